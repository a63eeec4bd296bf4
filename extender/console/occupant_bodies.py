"""Who holds memory of a device, as several views show it."""

from pydantic import BaseModel

from extender.state.device_occupants import Held


class UseView(BaseModel):
    """A container on the device, as the agent saw it."""

    container: str
    replica: str | None
    used_bytes: int | None
    #: Where the holding was learned, and where the bytes were.
    source: str


class HeldView(BaseModel):
    namespace: str
    name: str
    uid: str
    #: waiting (promised, not bound as far as was seen), on_its_way (bound, on no device yet),
    #: running, ending (its memory is not free yet), gone (no sample shows yet that it is free).
    phase: str
    #: False: it came without Headroom, and only what it uses is charged.
    reserved: bool
    requested_bytes: int
    measured_bytes: int | None
    charged_bytes: int
    #: By how much it uses more than it asked for.
    exceeds_by_bytes: int
    since: str | None
    priority: int | None
    containers: list[UseView]


def held_view(held: Held) -> HeldView:
    return HeldView(
        namespace=held.namespace,
        name=held.name,
        uid=held.uid,
        phase=held.phase,
        reserved=held.reserved,
        requested_bytes=held.requested_bytes,
        measured_bytes=held.measured_bytes,
        charged_bytes=held.charged_bytes,
        exceeds_by_bytes=held.charged_bytes - held.requested_bytes if held.reserved else 0,
        since=held.since or None,
        priority=held.priority,
        containers=[
            UseView(
                container=use.container,
                replica=use.replica or None,
                used_bytes=use.used_bytes,
                source=use.source,
            )
            for use in held.uses
        ],
    )
