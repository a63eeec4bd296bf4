"""Applies changes of the settings files to the running process if they need no restart.

If a file has errors, the current settings stay in use. The errors are logged, counted and shown in
/v1/status until the file is correct.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from headroom.runtime.loops import Loops
from headroom.runtime.settings.loading import check_settings
from headroom.runtime.settings.settings import RELOADED, Settings
from headroom.runtime.settings.settings_files import Stamp, stamp
from headroom.runtime.telemetry import ProcessTelemetry

log = structlog.get_logger()

#: Seconds between two checks of the file.
EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Origin:
    """The sources of the settings: a file or folder, environment and flags. Without ``path``, they
    never change."""

    path: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)


#: An origin without a file, variables and flags. Its settings never change.
ANYWHERE = Origin()


class SettingsReloader:
    """Watches the settings files, and calls ``take`` with changed settings on the event loop."""

    def __init__(
        self,
        origin: Origin,
        settings: Settings,
        take: Callable[[Settings], None],
        telemetry: ProcessTelemetry,
    ) -> None:
        self._origin = origin
        self._settings = settings
        self._take = take
        self._telemetry = telemetry
        self._seen = self._stamp()
        #: Whether the file was missing at the last check.
        self._was_missing = False
        #: Settings that the sources had at the start, for comparison in ``after_restart``. The
        #: process may run with other settings, because commands override some of them.
        self._initial = check_settings(origin.path, origin.env, origin.flags)[0] or settings
        #: The errors in the file, each with its line. Empty if there are none.
        self.rejected: tuple[str, ...] = ()
        #: Names of settings whose new values take effect only after a restart.
        self.after_restart: tuple[str, ...] = ()

    @property
    def file(self) -> Path | None:
        return self._origin.path

    def start(self, loops: Loops) -> None:
        async def check() -> None:
            self.once()

        if self._origin.path is not None:
            loops.start("settings", check, EVERY_S)

    def once(self) -> None:
        """Apply the file if it has changed since the last call and is valid.

        The file counts as missing only if it is missing in two calls, because the file of a mounted
        ConfigMap can be missing for a moment while it is updated.
        """
        if self._origin.path is None:
            return
        current, was_missing = self._stamp(), self._was_missing
        self._was_missing = current is None
        if current == self._seen or (current is None and not was_missing):
            return
        written, problems = check_settings(self._origin.path, self._origin.env, self._origin.flags)
        if written is None and self._stamp() != current:
            return  # the file was replaced while it was read; the next call reads the new file
        if written is None:
            self._seen = current
            self.rejected = tuple(map(str, problems))
            self._telemetry.settings_reloads.labels("rejected").inc()
            log.error("settings_rejected", problems=self.rejected)
            return
        self.rejected = ()
        self.after_restart = tuple(
            name
            for name in Settings.model_fields
            if name not in RELOADED and getattr(written, name) != getattr(self._initial, name)
        )
        taken = {
            name: getattr(written, name)
            for name in RELOADED
            if getattr(written, name) != getattr(self._settings, name)
        }
        self._telemetry.settings_reloads.labels("taken").inc()
        log.info("settings_read", taken=list(taken), after_restart=list(self.after_restart))
        if taken:
            settings = self._settings.model_copy(update=taken)
            self._take(settings)
            self._settings = settings
        self._seen = current  # after a failure before this line, the next call tries again

    def _stamp(self) -> Stamp | None:
        return None if self._origin.path is None else stamp(self._origin.path)
