"""Bodies of pods that hold memory of a device."""

from pydantic import BaseModel

from extender.state.device_occupants import Held


class UseView(BaseModel):
    """A container on the device, as the agent reports it."""

    container: str
    replica: str | None
    used_bytes: int | None
    #: Sources of the allocation and of the bytes.
    source: str


class HeldView(BaseModel):
    namespace: str
    name: str
    uid: str
    #: waiting (reserved, no Binding seen yet), unconfirmed (bound, not observed on a device yet),
    #: running, ending (its memory is not free yet) or gone (no sample shows it as free yet).
    phase: str
    #: False: bound without a reservation; only its measured use counts.
    reserved: bool
    requested_bytes: int
    measured_bytes: int | None
    charged_bytes: int
    #: Use above the request.
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
