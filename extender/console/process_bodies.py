"""How the process itself does: what /v1/status tells that no snapshot knows."""

from dataclasses import dataclass

from pydantic import BaseModel


class SourceView(BaseModel):
    """One kind of object that is watched at the API server."""

    kind: str
    #: Whether all of it was listed.
    synced: bool
    #: Since the server last said anything about it, if only that nothing is new.
    contact_age_s: float | None
    reconnects: int
    lists: int
    #: Objects that cannot be read at present.
    unreadable: int


class LagView(BaseModel):
    """How late the event loop was, which every scheduler call waits for."""

    p50_s: float
    p99_s: float
    max_s: float
    #: How far back.
    window_s: float


class SettingsView(BaseModel):
    #: enforce; or observe, in which nothing is refused, preferred, evicted or told in Events.
    mode: str
    #: Read again whenever it changes; null where there is none.
    file: str | None
    #: What is wrong with it as it is now, each with its line: the settings of before go on.
    rejected: list[str]
    #: Settings that it says otherwise, which count after a restart.
    after_restart: list[str]


def enforcing() -> SettingsView:
    """Of an application without a file of settings."""
    return SettingsView(mode="enforce", file=None, rejected=[], after_restart=[])


@dataclass(frozen=True, slots=True)
class Machinery:
    version: str
    python: str
    #: Unix time, seconds.
    started_at_s: float
    sources: list[SourceView]
    #: Whether something that was heard is not taken in yet.
    behind: bool
    #: None before anything was sampled.
    loop_lag: LagView | None
    #: None where the system does not tell.
    memory_bytes: int | None


def unknown() -> Machinery:
    """Of an application without a process of its own."""
    return Machinery("unknown", "unknown", 0.0, [], False, None, None)
