"""Checks that the events that the driver has queued reach the agent, even if other devices fail or
disappear.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from agent.probes.nvml import Gate
from agent.probes.xids import XidWatch
from tests.waiting import until

_XID = 8
_TIMEOUT, _LOST, _UNKNOWN = 10, 15, 999


class _Error(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"code {value}")
        self.value = value


class _Event:
    eventType = _XID

    def __init__(self, device: int, number: int) -> None:
        self.device = device
        self.eventData = number


class _Set:
    def __init__(self) -> None:
        self.devices: set[int] = set()
        self.queue: deque[_Event] = deque()
        self.freed = False


class _Library:
    """Simulates NVML's event sets. An event is queued in each set that contains its device, and is
    lost when the set is freed.
    """

    NVMLError = _Error

    def __init__(self) -> None:
        self.sets: list[_Set] = []
        self.lock = threading.Lock()
        #: Error code that the registration of each device returns.
        self.fails: dict[int, int] = {}
        #: If set, the next wait returns that a device is lost.
        self.loses = threading.Event()
        #: If not set, waits return no events.
        self.delivers = threading.Event()
        self.delivers.set()

    def nvmlInitWithFlags(self, flags: int) -> None:
        """Do nothing."""

    def nvmlEventSetCreate(self) -> _Set:
        self.sets.append(_Set())
        return self.sets[-1]

    def nvmlEventSetFree(self, events: _Set) -> None:
        with self.lock:
            events.freed = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetSupportedEventTypes(self, device: int) -> int:
        return _XID

    def nvmlDeviceRegisterEvents(self, device: int, kinds: int, events: _Set) -> None:
        if code := self.fails.get(device):
            raise _Error(code)
        with self.lock:
            events.devices.add(device)

    def nvmlEventSetWait_v2(self, events: _Set, timeout_ms: int) -> _Event:
        until_s = time.monotonic() + timeout_ms / 1000
        while True:
            if timeout_ms and self.loses.is_set():
                self.loses.clear()
                raise _Error(_LOST)
            with self.lock:
                assert not events.freed
                if events.queue and (self.delivers.is_set() or not timeout_ms):
                    return events.queue.popleft()
            if time.monotonic() >= until_s:
                raise _Error(_TIMEOUT)
            time.sleep(0.001)

    def fail(self, device: int, *numbers: int) -> None:
        with self.lock:
            for events in self.sets:
                if device in events.devices and not events.freed:
                    events.queue += [_Event(device, number) for number in numbers]

    def registered(self) -> set[int]:
        """Return the devices that are registered in an event set."""
        with self.lock:
            return {each for events in self.sets if not events.freed for each in events.devices}


@pytest.fixture
def library() -> _Library:
    return _Library()


@pytest.fixture
def watch(library: _Library) -> Iterator[XidWatch]:
    gate = Gate(library)
    gate.start()
    watched = XidWatch(gate, deadline_s=10, wait_ms=20)
    yield watched
    library.delivers.set()
    watched.close()


def _heard(watch: XidWatch, count: int) -> list[tuple[str | None, int]]:
    found: list[tuple[str | None, int]] = []

    def enough() -> bool:
        found.extend((xid.uuid, xid.number) for xid in watch.drain())
        return len({*found}) >= count

    until(enough, f"{count} XIDs")
    return sorted({*found}, key=lambda each: each[1])


def _grow(watch: XidWatch, library: _Library) -> None:
    watch.watch({"GPU-1", "GPU-2", "GPU-3"})
    until(lambda: library.registered() >= {3}, "the new device is registered")


def _shrink(watch: XidWatch, library: _Library) -> None:
    watch.watch({"GPU-1"})
    until(lambda: library.registered() == {1}, "the other device is not registered any more")


def _lose(watch: XidWatch, library: _Library) -> None:
    library.fails[2] = _LOST
    library.loses.set()
    until(lambda: library.registered() == {1}, "the lost device is not registered any more")


def _retry(watch: XidWatch, library: _Library) -> None:
    library.fails[3] = _UNKNOWN
    watch.watch({"GPU-1", "GPU-2", "GPU-3"})
    until(lambda: any("GPU-3" in each for each in watch.lacks), "a device that is not registered")
    del library.fails[3]
    until(lambda: library.registered() >= {3}, "a device that is registered again")


def _end(watch: XidWatch, library: _Library) -> None:
    watch.watch(())
    until(lambda: watch.quiet, "a watch without devices")
    assert library.registered() == set()


@pytest.mark.parametrize("change", [_grow, _shrink, _lose, _retry, _end])
def test_queued_events_survive_a_change_of_devices(
    watch: XidWatch, library: _Library, change: Callable[[XidWatch, _Library], None]
) -> None:
    watch.watch({"GPU-1", "GPU-2"})
    until(lambda: library.registered() == {1, 2}, "both devices are registered")
    library.delivers.clear()
    library.fail(1, 31, 43, 79)
    change(watch, library)
    library.delivers.set()
    assert _heard(watch, 3) == [("GPU-1", 31), ("GPU-1", 43), ("GPU-1", 79)]


def test_a_device_that_cannot_be_registered_drops_no_events_of_others(
    watch: XidWatch, library: _Library
) -> None:
    library.fails[3] = _UNKNOWN
    watch.watch({"GPU-1", "GPU-2", "GPU-3"})
    until(lambda: library.registered() == {1, 2}, "both devices are registered")
    for first in range(0, 40, 8):
        library.fail(1, *range(first, first + 8))
        assert _heard(watch, 8) == [("GPU-1", number) for number in range(first, first + 8)]
    assert [each for each in watch.lacks if "GPU-3" in each]
