"""Receives XID events, which the driver reports once to each process that waits for them.

The wait is a driver call that takes seconds by design, so it has its own thread. If the call does
not return long after its timeout, the source ``xid`` is reported as degraded.
"""

import contextlib
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

#: Timeout of one wait in milliseconds. Newly watched devices are registered when it ends.
WAIT_MS = 2000
#: Pause in seconds after an error, and instead of a wait while no device could be registered.
_PAUSE_S = 1.0
#: Seconds between two checks while no device is watched.
_IDLE_S = 0.25
#: After this many waits have timed out, the devices that could not be registered are tried again.
_TIMEOUTS_BEFORE_RETRY = 3
#: Maximum number of events that are read from an event set before it is freed.
_MOST_QUEUED = 1000


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
        #: Why the XIDs of a device are not received, by UUID.
        self._failed: dict[str, str] = {}
        #: When the thread last returned from a wait or a pause, on the clock ``monotonic``.
        self._returned_s = 0.0
        #: Whether the thread may have a driver call in progress.
        self._listening = False
        #: Event sets that are no longer used, with their handles. They are freed when the next
        #: event set is registered. Until then, events are queued in both sets, and duplicates count
        #: once.
        self._old: list[tuple[Any, dict[str, Any]]] = []
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
                # The system cannot start a thread now, so the next sample tries again.
                return
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
        """Messages about XIDs that are not received. They change only if the cause changes."""
        if self._thread is None:
            return ["no thread could be started, so XIDs are not received"] if self._wanted else []
        if self._monotonic() - self._returned_s > self._wait_ms / 1000 + self._deadline_s:
            return ["driver call nvmlEventSetWait_v2 hangs, so XIDs are not received"]
        with self._lock:
            failed = sorted(self._failed.items())
            return [f"no XID events of {uuid}: {why}" for uuid, why in failed]

    def close(self) -> None:
        self._stop.set()

    def _listen(self) -> None:
        """Receive the events of the watched devices, until ``close``."""
        while not self._stop.is_set():
            with self._lock:
                watched = self._wanted
                self._listening = self._listening or bool(watched)
            if not watched:
                self._discard()
                self._set_failed({})
                with self._lock:
                    self._listening = False
                self._returned_s = self._monotonic()
                self._stop.wait(_IDLE_S)
                continue
            events, handles = None, dict[str, Any]()
            try:
                events = self._gate.ask("nvmlEventSetCreate")
                self._follow(events, handles)
            except Exception as err:  # noqa: BLE001 - the thread must continue
                if not isinstance(err, NvmlError):
                    _log.error("xid_listener_failed", exc_info=err)
                # A lost device ends the wait for all devices. The other devices are watched again
                # after the pause.
                self._set_failed(dict.fromkeys(watched, str(err)))
                self._stop.wait(_PAUSE_S)
            self._old.append((events, handles))
            self._returned_s = self._monotonic()
        self._discard()

    def _follow(self, events: Any, handles: dict[str, Any]) -> None:
        """Receive events until a registered device is no longer watched.

        Devices are added to the same event set, because events that are queued in a set are lost
        when it is freed. ``handles`` receives the handles of the registered devices by UUID.
        """
        retry_s = float("-inf")
        while not self._stop.is_set():
            wanted = self._wanted
            if not wanted >= handles.keys():
                return
            missing = wanted - handles.keys()
            if missing - self._failed.keys() or self._monotonic() >= retry_s:
                self._register(missing, events, handles)
                retry_s = self._monotonic() + _TIMEOUTS_BEFORE_RETRY * self._wait_ms / 1000
                self._discard()
            if handles:
                self._receive(events, handles, self._wait_ms)
            else:
                self._stop.wait(_PAUSE_S)
                self._returned_s = self._monotonic()

    def _register(self, uuids: Collection[str], events: Any, handles: dict[str, Any]) -> None:
        """Register devices for the event set, and add their handles."""
        failed: dict[str, str] = {}
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

    def _receive(self, events: Any, handles: dict[str, Any], wait_ms: int) -> bool:
        """Wait for one event and store it. Return False if no event arrives within ``wait_ms``."""
        event = self._gate.event(events, wait_ms)
        self._returned_s = self._monotonic()
        if event is None:
            return False
        if event.eventType == _XID_EVENTS:
            xid = Xid(self._uuid_of(event, handles), int(event.eventData), SOURCE)
            with self._lock:
                self._received.append(xid)
        return True

    def _discard(self) -> None:
        """Free the event sets that are no longer used, and store the events queued in them."""
        while self._old:
            events, handles = self._old.pop()
            # The error that ended the wait was already reported.
            with contextlib.suppress(NvmlError):
                for _ in range(_MOST_QUEUED if handles else 0):
                    if not self._receive(events, handles, 0):
                        break
            self._free(events)

    def _uuid_of(self, event: Any, handles: dict[str, Any]) -> str | None:
        """Return the event's device, or None if unknown. A lost device has a handle but no UUID."""
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
