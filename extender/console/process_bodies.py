"""The state of the process itself, for /v1/status."""

from dataclasses import dataclass

from pydantic import BaseModel


class SourceView(BaseModel):
    """A watch of one kind of object at the API server."""

    kind: str
    #: Whether the initial list is complete.
    synced: bool
    #: Seconds since the API server last sent anything for it, bookmarks included.
    contact_age_s: float | None
    reconnects: int
    lists: int
    #: Number of objects that cannot be parsed now.
    unreadable: int


class LagView(BaseModel):
    """Delay of the event loop, which adds to the time of every scheduler call."""

    p50_s: float
    p99_s: float
    max_s: float
    #: Length of the measured period.
    window_s: float


class SettingsView(BaseModel):
    #: enforce or observe. In mode observe, Headroom rejects, prefers and evicts nothing, and
    #: creates no Events.
    mode: str
    #: The settings file, reloaded whenever it changes; null without one.
    file: str | None
    #: Mistakes in the current file, each with its line; the previous settings stay in use.
    rejected: list[str]
    #: Settings that changed in the file and take effect after a restart.
    after_restart: list[str]


def enforcing() -> SettingsView:
    """Return the settings of an application without a settings file."""
    return SettingsView(mode="enforce", file=None, rejected=[], after_restart=[])


@dataclass(frozen=True, slots=True)
class Machinery:
    """The state of the process: version, watches, event loop and memory."""

    version: str
    python: str
    #: Unix time, seconds.
    started_at_s: float
    sources: list[SourceView]
    #: Whether received changes are not applied yet.
    behind: bool
    #: None before anything was sampled.
    loop_lag: LagView | None
    #: Resident memory; None if the system does not report it.
    memory_bytes: int | None


def unknown() -> Machinery:
    """Return the state of an application without its own process."""
    return Machinery("unknown", "unknown", 0.0, [], False, None, None)
