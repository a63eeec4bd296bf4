"""The state of the process itself: its watches and settings."""

from collections.abc import Iterable

from headroom.console.responses import rounded_s
from headroom.console.view import View
from headroom.runtime.kube.resources import Health


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


class SettingsView(View):
    mode: str
    """enforce or observe. In mode observe, Headroom rejects, prefers and evicts nothing, and
    creates no Events."""
    file: str | None
    """The settings file or folder, which is reloaded whenever it changes; null if there is none."""
    rejected: list[str]
    """Errors in the current file, each with its line. The previous settings stay in use."""
    after_restart: list[str]
    """Settings that changed in the file but take effect only after a restart."""
    grafana_url: str | None = None
    """Template of the links to a dashboard (setting grafana_url); null if it is not set."""
    long_history: bool = False
    """Whether history of more than an hour can be read, which requires setting prometheus_url."""


def enforcing() -> SettingsView:
    """Return the settings of an application without a settings file."""
    return SettingsView(mode="enforce", file=None, rejected=[], after_restart=[])


def source_views(watches: Iterable[Health]) -> list[SourceView]:
    return [SourceView.of(each, contact_age_s=rounded_s(each.contact_age_s)) for each in watches]
