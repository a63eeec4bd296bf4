"""The state of the process itself: its memory, event loop, watches and settings."""

import platform
from dataclasses import dataclass

from headroom.console.responses import rounded_s
from headroom.console.view import View
from headroom.runtime.follow.process_monitor import ProcessMonitor, memory_bytes
from headroom.runtime.telemetry import LAG_EVERY_S
from headroom.version import own_version


class SourceView(View):
    """A watch of the API server for one kind of object."""

    kind: str
    synced: bool
    """Whether the initial list is complete."""
    contact_age_s: float | None
    """Seconds since the API server last sent anything on this watch, including bookmarks."""
    reconnects: int
    lists: int
    unreadable: int
    """Number of current objects that cannot be parsed."""


class LagView(View):
    """Delay of the event loop, which adds to the time of every scheduler call."""

    p50_s: float
    p99_s: float
    max_s: float
    window_s: float
    """Length of the measured period."""


class SettingsView(View):
    mode: str
    """enforce or observe. In mode observe, Headroom rejects, prefers and evicts nothing, and
    creates no Events."""
    file: str | None
    """The settings file, which is reloaded whenever it changes; null if there is none."""
    rejected: list[str]
    """Errors in the current file, each with its line. The previous settings stay in use."""
    after_restart: list[str]
    """Settings that changed in the file but take effect only after a restart."""
    grafana_url: str | None = None
    """Template of the links to a dashboard (setting grafana_url); null if it is not set."""
    long_history: bool = False
    """Whether history of more than an hour can be read, because setting prometheus_url is set."""


def enforcing() -> SettingsView:
    """Return the settings of an application without a settings file."""
    return SettingsView(mode="enforce", file=None, rejected=[], after_restart=[])


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """The state of a process: version, watches, event loop and memory."""

    version: str
    python: str
    #: Unix time in seconds.
    started_at_s: float
    sources: list[SourceView]
    #: Whether received changes are not applied yet.
    behind: bool
    #: None until the first sample.
    loop_lag: LagView | None
    #: Resident memory; None if the system does not report it.
    memory_bytes: int | None


def unknown_process() -> ProcessStatus:
    """Return the state of an application that has no process of its own."""
    return ProcessStatus("unknown", "unknown", 0.0, [], False, None, None)


def process_status(monitor: ProcessMonitor) -> ProcessStatus:
    """Return the current state of this process. May be called from any thread."""
    return ProcessStatus(
        version=own_version(),
        python=platform.python_version(),
        started_at_s=monitor.started_at_s,
        sources=[
            SourceView(
                kind=each.kind,
                synced=each.synced,
                contact_age_s=rounded_s(each.contact_age_s),
                reconnects=each.reconnects,
                lists=each.lists,
                unreadable=each.unreadable,
            )
            for each in monitor.health()
        ],
        behind=monitor.behind(),
        loop_lag=_lag(monitor.lags_s()),
        memory_bytes=memory_bytes(),
    )


def _lag(ascending_s: list[float]) -> LagView | None:
    """Return the quantiles of sorted samples, or None if there are none."""
    if not ascending_s:
        return None
    last = len(ascending_s) - 1
    return LagView(
        p50_s=round(ascending_s[last // 2], 6),
        p99_s=round(ascending_s[last * 99 // 100], 6),
        max_s=round(ascending_s[last], 6),
        window_s=round(len(ascending_s) * LAG_EVERY_S, 3),
    )
