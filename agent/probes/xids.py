"""Listens for XIDs: the driver tells each of them once, to whoever waits at that moment.

The wait has a thread of its own, since it is a driver call that takes seconds by design. It is
watched from outside like every other: one that has not returned long after its timeout is said.
"""

import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from agent.probes.device_health import Xid
from agent.probes.nvml import DriverGone, Gate, NvmlError

SOURCE = "nvml"
_XID_EVENTS = 8  # nvmlEventTypeXidCriticalError

#: One wait; devices that came meanwhile are listened to after it.
WAIT_MS = 2000
_PAUSE_S = 1.0
#: Until it is looked again whether there is anything to listen to.
_IDLE_S = 0.25
#: So often is waited before devices that could not be listened to are tried again.
_WAITS_BEFORE_AGAIN = 3


class XidWatch:
    """A wait that is ``deadline_s`` over its time counts as one that hangs.

    ``watch`` and ``drain`` are for the sampling thread and never block."""

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
        self._heard: list[Xid] = []
        self._deaf: dict[str, str] = {}
        self._returned_s = 0.0
        self._listening = False
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def watch(self, uuids: Collection[str]) -> None:
        """Listen to these physical GPUs from now on; to none, and ``quiet`` becomes true."""
        with self._lock:
            self._wanted = frozenset(uuids)
        if self._thread is None and uuids:
            self._returned_s = self._monotonic()
            thread = threading.Thread(target=self._listen, name="xids", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return  # the machine has no thread left for us; perhaps next time
            self._thread = thread

    @property
    def quiet(self) -> bool:
        """Whether no call is under way, and none will be until ``watch`` names a GPU."""
        with self._lock:
            return not self._wanted and not self._listening

    def drain(self) -> list[Xid]:
        """Everything heard since the last call."""
        with self._lock:
            heard, self._heard = self._heard, []
        return heard

    @property
    def lacks(self) -> list[str]:
        """What is not listened to, and why; each constant while the cause is."""
        if self._thread is None:
            return ["no thread could be started, XIDs are not heard"] if self._wanted else []
        if self._monotonic() - self._returned_s > self._wait_ms / 1000 + self._deadline_s:
            return ["driver call nvmlEventSetWait_v2 hangs, XIDs are not heard"]
        with self._lock:
            return [f"no XID events of {uuid}: {why}" for uuid, why in sorted(self._deaf.items())]

    def close(self) -> None:
        self._stop.set()

    def _listen(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                heard = self._wanted
                self._listening = bool(heard)
            if not heard:
                self._now_deaf({})
                self._returned_s = self._monotonic()
                self._stop.wait(_IDLE_S)
                continue
            events = None
            try:
                events, handles = self._registered(heard)
                again = len(handles) < len(heard)
                waits = 0
                while not self._stop.is_set() and self._wanted == heard:
                    if again and waits == _WAITS_BEFORE_AGAIN:
                        break
                    self._wait(events, handles)
                    waits += 1
            except NvmlError as err:
                # One device that is lost ends every wait; the others are heard after the pause.
                self._now_deaf(dict.fromkeys(heard, str(err)))
                self._stop.wait(_PAUSE_S)
            finally:
                self._free(events)
                with self._lock:
                    self._listening = False
            self._returned_s = self._monotonic()

    def _registered(self, uuids: frozenset[str]) -> tuple[Any, dict[str, Any]]:
        """An event set that hears these devices, as far as the driver allows, and their handles."""
        deaf: dict[str, str] = {}
        handles: dict[str, Any] = {}
        events = self._gate.ask("nvmlEventSetCreate")
        for uuid in uuids:
            try:
                handle = self._gate.ask("nvmlDeviceGetHandleByUUID", uuid)
                kinds = handle and self._gate.ask("nvmlDeviceGetSupportedEventTypes", handle)
                if events is None or not kinds or not kinds & _XID_EVENTS:
                    deaf[uuid] = "the driver has none"
                elif self._gate.does("nvmlDeviceRegisterEvents", handle, _XID_EVENTS, events):
                    handles[uuid] = handle
                else:
                    deaf[uuid] = "the driver does not register them"
            except DriverGone:
                raise
            except NvmlError as err:
                deaf[uuid] = str(err)
        self._now_deaf(deaf)
        return events, handles

    def _wait(self, events: Any, handles: dict[str, Any]) -> None:
        if not handles:
            self._stop.wait(_PAUSE_S)
            self._returned_s = self._monotonic()
            return
        event = self._gate.event(events, self._wait_ms)
        self._returned_s = self._monotonic()
        if event is None or event.eventType != _XID_EVENTS:
            return
        with self._lock:
            self._heard.append(Xid(self._named(event, handles), int(event.eventData), SOURCE))

    def _named(self, event: Any, handles: dict[str, Any]) -> str | None:
        """Which of ours it is; by the handle first, since a lost device does not tell its UUID."""
        for uuid, handle in handles.items():
            if self._gate.same(handle, event.device):
                return uuid
        try:
            uuid = self._gate.ask("nvmlDeviceGetUUID", event.device)
        except NvmlError:
            return None
        return uuid if uuid in handles else None

    def _now_deaf(self, deaf: dict[str, str]) -> None:
        with self._lock:
            self._deaf = deaf

    def _free(self, events: Any) -> None:
        try:
            if events is not None:
                self._gate.ask("nvmlEventSetFree", events)
        except NvmlError:
            return
