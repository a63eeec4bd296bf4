"""Makes every driver call of the agent, and is the only module that uses NVML.

Drivers use different entry sizes for the same process list, and no driver reports which size it
uses (see the table in docs/design/agent.md). So the buffer is filled with a pattern first, and the
untouched part shows where the last entry ends. Every list is checked, not only the first one. An
empty list does not show the size, and with a wrong size the agent would read wrong processes with
wrong memory.
"""

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from agent.probes.nvml_errors import (
    UNSUPPORTED,
    DeviceFault,
    DeviceLost,
    DriverGone,
    NoDriver,
    Outcome,
    StaleHandle,
    TooSmall,
    UnknownLayout,
    error_of,
    outcome_of,
)

T = TypeVar("T")

#: With this flag, NVML does not fail if there is no GPU, so that a node whose only GPU fell off the
#: bus can still report this fault.
_INIT_NO_GPUS = 1
_DRIVER_NOT_LOADED = 9
_NOT_FOUND = 6
_TIMEOUT = 10
LIMITS_CALL = "nvmlDeviceGetMemoryLimits_v1"

_FIRST_PROCESSES = 64
_MOST_PROCESSES = 1 << 14
#: Versions of the process lists, newest first.
_LIST_VERSIONS = ("_v3", "_v2", "")
_MEMORY_V2 = "nvmlDeviceGetMemoryInfo_v2"

#: Fill pattern of a buffer. Entries that a driver writes do not consist of this byte.
_POISON = 0xA5
#: Layout of an entry of a process list (process id, bytes used), by its size in bytes.
_PROCESSES = {
    16: struct.Struct("<I4xQ"),
    24: struct.Struct("<I4xQ8x"),
    32: struct.Struct("<I4xQ16x"),
}
_LONGEST_BYTES = max(_PROCESSES)
#: A sample consists of the process id, the time in microseconds and the SM utilisation in percent.
_SAMPLE = struct.Struct("<I4xQI12x")
_NOT_AVAILABLE = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """The driver's memory limits (r615 and newer) for one cgroup on one device, and its use."""

    used_bytes: int
    #: The soft limit in bytes, or None if there is no limit.
    soft_bytes: int | None
    hard_bytes: int | None


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one device in bytes, exactly as the driver reports it."""

    total_bytes: int
    free_bytes: int
    #: Bytes reserved by the driver, or None if the driver is older than r510 and does not report
    #: them. They are never derived from `used`, which the two versions of the call define
    #: differently.
    reserved_bytes: int | None


class Gate:
    """Makes all NVML calls. Its methods raise the errors of ``nvml_errors``.

    ``library`` is the module ``pynvml`` of nvidia-ml-py, or an object with the same names. By
    default ``start`` imports pynvml, so the agent can be imported on machines without the package.
    """

    def __init__(self, library: Any = None) -> None:  # pynvml has no types
        self._library = library
        self._started = False
        #: The driver call that each thread is making, by thread id. Calls that do not return are
        #: reported with these names.
        self._calls: dict[int, str] = {}
        #: Calls that failed because a permission is missing. The caller clears the set before each
        #: sample.
        self.forbidden: set[str] = set()
        #: Calls that this driver does not support. If a call has several versions, the newest
        #: version that is not in this set is used.
        self._missing: set[str] = set()
        #: Number of entries of the longest list that each call has returned.
        self._lengths: dict[str, int] = {}

    def start(self) -> None:
        """Load and initialise the driver library, unless this was done before.

        Raises ``NoDriver`` and ``DriverGone``.
        """
        if self._started:
            return
        if self._library is None:
            try:
                import pynvml
            except ImportError as err:
                raise NoDriver(
                    "Python package nvidia-ml-py is missing. "
                    "Install it with: pip install 'headroom-gpu[agent]'"
                ) from err
            self._library = pynvml
        try:
            self._started = self.does("nvmlInitWithFlags", _INIT_NO_GPUS)
        except (DeviceFault, StaleHandle) as err:
            raise NoDriver(f"NVML cannot be initialised: {err}") from err
        except DriverGone as err:
            if getattr(err.__cause__, "value", None) == _DRIVER_NOT_LOADED:
                raise NoDriver(str(err)) from err  # The driver may be loaded later.
            raise
        if not self._started:
            why = "permission to open /dev/nvidiactl" if self.forbidden else "nvmlInitWithFlags"
            raise NoDriver(f"NVML cannot be initialised: no {why}")

    def stop(self) -> None:
        """Close the driver, so that it can be unloaded and its devices reset. ``start`` opens it
        again.

        No other call may be in progress. Raises the errors of ``ask``.
        """
        if self._started:
            self._started = False
            self._missing.clear()
            self._lengths.clear()
            self.ask("nvmlShutdown")

    def ask(self, name: str, *args: Any) -> Any:
        """Call pynvml's function ``name`` and return its value.

        Return None if the driver or the device does not support the call, or if the agent lacks the
        permission. Raises ``NoDriver``, ``DriverGone``, ``DeviceFault``, ``DeviceLost`` and
        ``StaleHandle``.
        """
        function = getattr(self._library, name, None)
        return None if function is None else self._made(name, lambda: function(*args))

    def ask_each(self, handle: Any, calls: Sequence[Sequence[Any]]) -> tuple[list[Any], list[str]]:
        """Make independent calls for a device. Each call is a name followed by its other arguments.

        Return their values (None for a failed call) and the errors. Raises ``DeviceLost`` and
        ``DriverGone``.
        """
        values: list[Any] = []
        errors: list[str] = []
        for name, *args in calls:
            try:
                values.append(self.ask(name, handle, *args))
            except DeviceLost:
                raise
            except (DeviceFault, StaleHandle) as err:
                values.append(None)
                errors.append(str(err))
        return values, errors

    def identify(self, index: int) -> tuple[Any, str]:
        """Return the handle and the UUID of the GPU at ``index``.

        Raises ``DeviceFault`` if the driver does not report them, and the errors of ``ask``.
        """
        handle = self.ask("nvmlDeviceGetHandleByIndex", index)
        uuid = None if handle is None else self.ask("nvmlDeviceGetUUID", handle)
        if uuid is None:
            raise DeviceFault("no handle or no UUID")
        return handle, uuid

    def does(self, name: str, *args: Any) -> bool:
        """Call a function without a return value, and return whether it succeeded.

        Return False in the cases in which ``ask`` returns None, and raise the same errors.
        """
        function = getattr(self._library, name, None)
        return function is not None and bool(
            self._made(name, lambda: function(*args) is None or True)
        )

    def has(self, name: str) -> bool:
        """Return whether the driver library exports a call, without making the call."""
        return name not in self._missing and bool(
            self._made(name, lambda: bool(self._library._nvmlGetFunctionPointer(name)))
        )

    def struct(self, name: str) -> Any:
        """Return an empty pynvml struct, to be filled and passed to ``ask``."""
        return getattr(self._library, name)()

    def memory(self, handle: Any) -> Memory | None:
        """Return the memory of one device, or None if the device does not report it, such as an
        integrated GPU."""
        library = self._library
        if _MEMORY_V2 not in self._missing:
            v2 = self._made(
                _MEMORY_V2, lambda: library.nvmlDeviceGetMemoryInfo(handle, library.nvmlMemory_v2)
            )
            if v2 is not None:
                return Memory(int(v2.total), int(v2.free), int(v2.reserved))
        v1 = self.ask("nvmlDeviceGetMemoryInfo", handle)
        return None if v1 is None else Memory(int(v1.total), int(v1.free), None)

    def processes(self, handle: Any) -> dict[int, int | None] | None:
        """Return the bytes of each pid on the device, for compute, graphics and MPS processes.

        The bytes are None if the driver does not report them, and the result is None if it does not
        list compute processes. A pid may be in several lists, each time with its whole use. So the
        largest figure is returned, not the sum.
        """

        def fill(call: Any, count: ctypes.c_uint, array: Any) -> int:
            return int(call(handle, ctypes.byref(count), array))

        found: dict[int, int | None] = {}
        for kind in ("Compute", "Graphics", "MPSCompute"):
            listed: list[tuple[int, int | None]] | None = None
            for version in _LIST_VERSIONS:
                if (name := f"nvmlDeviceGet{kind}RunningProcesses{version}") in self._missing:
                    continue
                listed = self._filled(name, "c_nvmlProcessInfo_v2_t", fill, _process_list)
                if name not in self._missing:
                    break
            if listed is None and kind == "Compute":
                return None
            for pid, used_bytes in listed or ():
                known = found.get(pid)
                found[pid] = max(known or 0, used_bytes) if used_bytes is not None else known
        return found

    def process_samples(self, handle: Any, since_us: int) -> list[tuple[int, int, int]] | None:
        """Return the samples of processes since ``since_us`` (microseconds of the wall clock).

        A sample is a pid, a time of the driver's clock in microseconds, and SM utilisation in
        percent. The result is empty if no process was active (the driver answers NOT_FOUND), and
        None if the driver does not measure processes.
        """

        def fill(call: Any, count: ctypes.c_uint, array: Any) -> int:
            code = int(call(handle, array, ctypes.byref(count), ctypes.c_ulonglong(since_us)))
            if code == _NOT_FOUND:
                count.value = code = 0
            return code

        return self._filled(
            "nvmlDeviceGetProcessUtilization",
            "c_nvmlProcessUtilizationSample_t",
            fill,
            lambda written, count, _: list(_SAMPLE.iter_unpack(written[: count * _SAMPLE.size])),
        )

    def limits(self, handle: Any, cgroup: str) -> Limits | None:
        """Return the memory limits and the use of a cgroup. ``cgroup`` is the full path of its
        directory.

        Return None if the driver has no such limits, because it is older than r615 or the device is
        MIG.
        """
        struct_type = getattr(self._library, "c_nvmlGetMemoryLimits_v1_t", None)
        if struct_type is None:
            return None
        asked = struct_type(nameSpace=cgroup.encode())
        if not self.does(LIMITS_CALL, handle, asked):
            return None
        unlimited = self._library.NVML_DEVICE_MEMORY_LIMIT_MAX
        soft, hard = int(asked.softLimit), int(asked.hardLimit)
        return Limits(
            used_bytes=int(asked.currentUsed),
            soft_bytes=None if soft == unlimited else soft,
            hard_bytes=None if hard == unlimited else hard,
        )

    def event(self, events: Any, wait_ms: int) -> Any:
        """Return the next event of an event set, or None if no event arrives within ``wait_ms``."""

        def wait() -> Any:
            try:
                return self._library.nvmlEventSetWait_v2(events, wait_ms)
            except self._library.NVMLError as err:
                if err.value != _TIMEOUT:
                    raise
                return None

        return self._made("nvmlEventSetWait_v2", wait)

    def why_late(self, thread_id: int | None) -> str:
        """Return why a thread has not returned. If it is in a driver call, the reason names the
        call."""
        call = None if thread_id is None else self._calls.get(thread_id)
        return f"driver call {call} hangs" if call else "reading it takes too long"

    def _filled(
        self,
        name: str,
        entry: str,
        fill: Callable[[Any, ctypes.c_uint, Any], int],
        read: Callable[[bytes, int, int], list[T]],
    ) -> list[T] | None:
        """Return the list that a call writes into an array, or None if the driver does not support
        the call.

        ``entry`` names pynvml's struct of an entry. ``fill`` makes the call with its function, a
        count and an array, and returns NVML's error code. ``read`` decodes the written bytes, given
        the number of entries and the length of the array.

        pynvml makes one call for the number of entries and another for the entries. Processes can
        start between the two calls, and if the driver answers the first call with SUCCESS, pynvml
        returns no entries. So this method passes an array with the first call, and a longer array
        if the first was too short.
        """
        entry_type = getattr(self._library, entry, None)
        if entry_type is None:
            return None
        size = max(_FIRST_PROCESSES, self._lengths.get(name, 0) * 2)
        count = ctypes.c_uint()

        def list_entries() -> list[T]:
            buffer = (ctypes.c_ubyte * (size * _LONGEST_BYTES))()
            ctypes.memset(buffer, _POISON, len(buffer))
            array = (entry_type * size).from_buffer(buffer)
            code = fill(self._library._nvmlGetFunctionPointer(name), count, array)
            if code != 0:
                raise self._library.NVMLError(code)
            listed = min(count.value, size)
            self._lengths[name] = max(listed, self._lengths.get(name, 0))
            return read(bytes(buffer), listed, size)

        while size <= _MOST_PROCESSES:
            count.value = size
            try:
                return self._made(name, list_entries)
            except TooSmall:
                size = max(size * 2, count.value * 2)
        return None

    def _made(self, name: str, call: Callable[[], T]) -> T | None:
        """Make a driver call, and return None if the call is not supported or not permitted.

        Translates pynvml's errors into the errors of ``nvml_errors``.
        """
        thread_id = threading.get_ident()
        self._calls[thread_id] = name
        try:
            return call()
        except (ValueError, OSError, ctypes.ArgumentError) as err:
            # Example: a name that is not UTF-8, or a function with unexpected arguments.
            raise DeviceFault(f"answer of {name} cannot be read: {type(err).__name__}") from err
        except getattr(self._library, "NVMLLibraryMismatchError", ()):
            # pynvml raises this error for FUNCTION_NOT_FOUND of a call without a version.
            self._missing.add(name)
        except self._library.NVMLError as err:
            if error := error_of(err.value):
                raise error(f"{err} (NVML {err.value})", err.value) from err
            if err.value in UNSUPPORTED:
                self._missing.add(name)
            if outcome_of(err.value) is Outcome.NO_PERMISSION:
                self.forbidden.add(name)
        finally:
            self._calls.pop(thread_id, None)
        return None


def _process_list(written: bytes, count: int, capacity: int) -> list[tuple[int, int | None]]:
    """Return (process id, bytes) of the first ``count`` entries. Unknown bytes are None.

    ``capacity`` is the length of the array that was passed to the driver. ``written`` is the whole
    buffer with ``_LONGEST_BYTES`` for each entry of the array, filled with ``_POISON`` before the
    call. Raises ``UnknownLayout`` if the size of an entry cannot be detected.
    """
    for entry_bytes, entry in _PROCESSES.items():
        end, array_end = count * entry_bytes, capacity * entry_bytes
        # Some drivers clear the whole array first.
        is_cleared = written.count(0, end, array_end) == array_end - end
        if _is_untouched(written, end) or (is_cleared and _is_untouched(written, array_end)):
            entries = entry.iter_unpack(written[:end])
            return [(pid, None if used == _NOT_AVAILABLE else used) for pid, used in entries]
    raise UnknownLayout


def _is_untouched(written: bytes, start: int) -> bool:
    """Return whether the buffer from ``start`` on contains only the fill pattern."""
    return written.count(_POISON, start) == len(written) - start
