"""Receives XID events: the driver reports each of them once, to the processes that wait for it.

The wait is a driver call that takes seconds by design, so it has its own thread. If the call does
not return long after its timeout, the source ``xid`` is reported as degraded.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import structlog

from agent.probes.device_health import Xid
from agent.probes.nvml import Gate
from agent.probes.nvml_errors import DriverGone, NvmlError

_log = structlog.get_logger()

SOURCE = "nvml"
_XID_EVENTS = 8  # nvmlEventTypeXidCriticalError

#: Timeout of one wait in milliseconds. Newly watched devices are registered after it.
WAIT_MS = 2000
#: Pause after an error, and in place of a wait while no device could be registered.
_PAUSE_S = 1.0
#: Pause between two checks while no device is watched.
_IDLE_S = 0.25
#: Number of waits before devices that could not be registered are tried again.
_WAITS_BEFORE_RETRY = 3


class XidWatch:
    """Receives the XIDs of the watched GPUs in its own thread.

    A wait that takes ``deadline_s`` longer than its timeout is reported as hanging. ``watch`` and
    ``drain`` are called by the sampling thread and never block.
    """

    def __init__(
        self,
        gate: Gate,
        deadline_s: float,
        wait_ms: int = WAIT_MS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gate = gate
        self._deadline_s = deadline_s
        self._wait_ms = wait_ms
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._wanted: frozenset[str] = frozenset()
        self._received: list[Xid] = []
        #: UUID -> why its XIDs are not received.
        self._failed: dict[str, str] = {}
        #: When the thread last returned from a wait or a pause (``monotonic``).
        self._returned_s = 0.0
        #: Whether the thread may have a driver call in progress.
        self._listening = False
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def watch(self, uuids: Collection[str]) -> None:
        """Watch exactly these physical GPUs from now on.

        If there are none, ``quiet`` becomes true after the wait in progress.
        """
        with self._lock:
            self._wanted = frozenset(uuids)
        if self._thread is None and uuids:
            self._returned_s = self._monotonic()
            thread = threading.Thread(target=self._listen, name="xids", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return  # no thread can be started now; the next sample tries again
            self._thread = thread

    @property
    def quiet(self) -> bool:
        """Whether no driver call is in progress, and none starts until ``watch`` names a GPU."""
        with self._lock:
            return not self._wanted and not self._listening

    def drain(self) -> list[Xid]:
        """Return the XIDs received since the last call."""
        with self._lock:
            received, self._received = self._received, []
        return received

    @property
    def lacks(self) -> list[str]:
        """Messages about XIDs that are not received, which stay the same while the cause lasts."""
        if self._thread is None:
            return ["no thread could be started, XIDs are not received"] if self._wanted else []
        if self._monotonic() - self._returned_s > self._wait_ms / 1000 + self._deadline_s:
            return ["driver call nvmlEventSetWait_v2 hangs, XIDs are not received"]
        with self._lock:
            failed = sorted(self._failed.items())
            return [f"no XID events of {uuid}: {why}" for uuid, why in failed]

    def close(self) -> None:
        self._stop.set()

    def _listen(self) -> None:
        """Register the watched devices and wait for their events, until ``close``.

        If the watched devices change or a call fails, register again with a new event set.
        """
        while not self._stop.is_set():
            with self._lock:
                watched = self._wanted
                self._listening = bool(watched)
            if not watched:
                self._set_failed({})
                self._returned_s = self._monotonic()
                self._stop.wait(_IDLE_S)
                continue
            events = None
            try:
                events, handles = self._registered(watched)
                incomplete = len(handles) < len(watched)
                waits = 0
                while not self._stop.is_set() and self._wanted == watched:
                    if incomplete and waits == _WAITS_BEFORE_RETRY:
                        break
                    self._wait(events, handles)
                    waits += 1
            except Exception as err:  # noqa: BLE001 - the thread must go on
                if not isinstance(err, NvmlError):
                    _log.error("xid_listener_failed", exc_info=err)
                # A lost device ends the wait for all; the others are watched after the pause.
                self._set_failed(dict.fromkeys(watched, str(err)))
                self._stop.wait(_PAUSE_S)
            finally:
                self._free(events)
                with self._lock:
                    self._listening = False
            self._returned_s = self._monotonic()

    def _registered(self, uuids: frozenset[str]) -> tuple[Any, dict[str, Any]]:
        """Return an event set for these devices, and the handles that could be registered."""
        failed: dict[str, str] = {}
        handles: dict[str, Any] = {}
        events = self._gate.ask("nvmlEventSetCreate")
        for uuid in uuids:
            try:
                handle = self._gate.ask("nvmlDeviceGetHandleByUUID", uuid)
                kinds = handle and self._gate.ask("nvmlDeviceGetSupportedEventTypes", handle)
                if events is None or not kinds or not kinds & _XID_EVENTS:
                    failed[uuid] = "the driver does not support them"
                elif self._gate.does("nvmlDeviceRegisterEvents", handle, _XID_EVENTS, events):
                    handles[uuid] = handle
                else:
                    failed[uuid] = "the driver does not register them"
            except DriverGone:
                raise
            except NvmlError as err:
                failed[uuid] = str(err)
        self._set_failed(failed)
        return events, handles

    def _wait(self, events: Any, handles: dict[str, Any]) -> None:
        """Wait for one event and store it. Returns after ``wait_ms`` at the latest."""
        if not handles:
            self._stop.wait(_PAUSE_S)
            self._returned_s = self._monotonic()
            return
        event = self._gate.event(events, self._wait_ms)
        self._returned_s = self._monotonic()
        if event is None or event.eventType != _XID_EVENTS:
            return
        with self._lock:
            self._received.append(Xid(self._uuid_of(event, handles), int(event.eventData), SOURCE))

    def _uuid_of(self, event: Any, handles: dict[str, Any]) -> str | None:
        """Return the event's device; None if unknown. A lost device has a handle, but no UUID."""
        for uuid, handle in handles.items():
            if _address(handle) == _address(event.device):
                return uuid
        try:
            uuid = self._gate.ask("nvmlDeviceGetUUID", event.device)
        except NvmlError:
            return None
        return uuid if uuid in handles else None

    def _set_failed(self, failed: dict[str, str]) -> None:
        with self._lock:
            self._failed = failed

    def _free(self, events: Any) -> None:
        try:
            if events is not None:
                self._gate.ask("nvmlEventSetFree", events)
        except NvmlError:
            return


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
