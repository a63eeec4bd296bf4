"""One gate for every driver call: decides what an NVML error code means to us.

NVML knows some thirty error codes and callers elsewhere guess at each of them. Here every code has
exactly one of seven outcomes, and what leaves the gate is a value, ``None`` (absent) or one of

    NvmlError
    ├── NoDriver       no NVIDIA driver here: not a GPU node, or not one yet; asked again later
    ├── DriverGone     the driver went or was replaced under us. pynvml caches function pointers and
    │                  never unloads the library, so only a new process can talk to the new driver
    ├── DeviceFault    this device cannot be trusted; the others can
    │   └── DeviceLost     it fell off the bus or asks for a reset: whichever call says so
    └── StaleHandle    the handle names nothing any more: resolve it again by UUID
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from agent.probes import nvml_entries

T = TypeVar("T")


class NvmlError(Exception):
    """Base of what the gate raises."""


class NoDriver(NvmlError):
    pass


class DriverGone(NvmlError):
    pass


class DeviceFault(NvmlError):
    pass


class DeviceLost(DeviceFault):
    pass


class StaleHandle(NvmlError):
    pass


class _TooSmall(NvmlError):
    """The array given was too short; never leaves the gate."""


class Outcome(Enum):
    """Everything that a refused driver call can mean to us."""

    ABSENT = "absent"
    NO_PERMISSION = "no permission"
    STALE_HANDLE = "stale handle"
    TOO_SMALL = "too small"
    DEVICE_FAULT = "device fault"
    DRIVER_GONE = "driver gone"
    NO_DRIVER = "no driver"


#: NVML code -> outcome. What is not listed (lost, reset required, timeout, unknown, codes of
#: drivers to come) is a fault of the device: not understanding an answer is no reason to trust it.
OUTCOMES = {
    0: Outcome.ABSENT,  # pynvml raises "SUCCESS" where a sizing call found nothing
    1: Outcome.DRIVER_GONE,  # UNINITIALIZED
    2: Outcome.STALE_HANDLE,  # INVALID_ARGUMENT
    3: Outcome.ABSENT,  # NOT_SUPPORTED
    4: Outcome.NO_PERMISSION,
    6: Outcome.ABSENT,  # NOT_FOUND
    7: Outcome.TOO_SMALL,  # INSUFFICIENT_SIZE
    9: Outcome.DRIVER_GONE,  # DRIVER_NOT_LOADED
    12: Outcome.NO_DRIVER,  # LIBRARY_NOT_FOUND
    13: Outcome.ABSENT,  # FUNCTION_NOT_FOUND: an old driver
    18: Outcome.DRIVER_GONE,  # LIB_RM_VERSION_MISMATCH
    25: Outcome.ABSENT,  # ARGUMENT_VERSION_MISMATCH: an old driver
    26: Outcome.ABSENT,  # DEPRECATED
    28: Outcome.ABSENT,  # GPU_NOT_FOUND: the node has none
}

#: Do not fail where no GPU is left: a node whose only GPU fell off the bus must still report that.
_INIT_NO_GPUS = 1

#: GPU_IS_LOST and RESET_REQUIRED.
_LOST = {15, 16}
_DRIVER_NOT_LOADED = 9
_NOT_FOUND = 6
_TIMEOUT = 10

#: FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH and DEPRECATED: another driver has the call.
_NOT_HAD = {13, 25, 26}
LIMITS_CALL = "nvmlDeviceGetMemoryLimits_v1"

_FIRST_PROCESSES = 64
_MOST_PROCESSES = 1 << 14
#: Versions of the process lists, newest first.
_LIST_VERSIONS = ("_v3", "_v2", "")
_MEMORY_V2 = "nvmlDeviceGetMemoryInfo_v2"


def outcome_of(code: int) -> Outcome:
    return OUTCOMES.get(code, Outcome.DEVICE_FAULT)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the driver (r615 and newer) grants the processes of one cgroup on one device, bytes."""

    used_bytes: int
    #: None: no limit.
    soft_bytes: int | None
    hard_bytes: int | None


@dataclass(frozen=True, slots=True)
class Memory:
    """What the driver says of one device, in bytes, as it says it."""

    total_bytes: int
    free_bytes: int
    #: Kept by the driver; None where it cannot tell (older than r510). Never derived from `used`,
    #: which the two versions of the call define differently.
    reserved_bytes: int | None


class Sample(NamedTuple):
    """SM utilisation of one process on a device."""

    pid: int
    #: By the driver's clock.
    at_us: int
    sm_percent: int


class Gate:
    """The only thing in the agent that touches NVML.

    ``library`` is the module ``pynvml`` of nvidia-ml-py, or anything that offers the same names;
    left out, it is imported by ``start``, so that the agent can be imported where it is missing.
    """

    def __init__(self, library: Any = None) -> None:  # pynvml has no types
        self._library = library
        self._started = False
        #: Thread -> the call that it is in, for whoever wonders why it does not return.
        self._calls: dict[int, str] = {}
        #: Calls that the driver refused for want of a privilege, since the reader last cleared it.
        self.forbidden: set[str] = set()
        #: Calls that the driver does not have, which only another driver changes. Of a call with
        #: several versions, the newest that is not in here is made.
        self._missing: set[str] = set()
        #: Call -> the most entries that a list of it had.
        self._lengths: dict[str, int] = {}

    def start(self) -> None:
        """Load and initialise the driver library, once. Raises ``NoDriver`` and ``DriverGone``."""
        if self._started:
            return
        if self._library is None:
            try:
                import pynvml
            except ImportError as err:
                raise NoDriver(
                    "Python package nvidia-ml-py is missing; "
                    "right is: pip install 'headroom-gpu[agent]'"
                ) from err
            self._library = pynvml
        try:
            with self._settled("nvmlInitWithFlags"):
                self._library.nvmlInitWithFlags(_INIT_NO_GPUS)
                self._started = True
        except (DeviceFault, StaleHandle) as err:
            raise NoDriver(f"NVML cannot be initialised: {err}") from err
        except DriverGone as err:
            if getattr(err.__cause__, "value", None) == _DRIVER_NOT_LOADED:
                raise NoDriver(str(err)) from err  # it was never there for us: it may still come
            raise
        if not self._started:
            why = "permission to open /dev/nvidiactl" if self.forbidden else "nvmlInitWithFlags"
            raise NoDriver(f"NVML cannot be initialised: no {why}")

    def stop(self) -> None:
        """Close the driver, so that it can be unloaded and its devices reset; ``start`` opens it.

        No other call may be under way. Raises as ``ask`` does.
        """
        if self._started:
            self._started = False
            self._missing.clear()
            self._lengths.clear()
            with self._settled("nvmlShutdown"):
                self._library.nvmlShutdown()

    def ask(self, name: str, *args: Any) -> Any:
        """Call ``name`` of pynvml; None where the driver, the device or our rights lack it."""
        function: Callable[..., Any] | None = getattr(self._library, name, None)
        if function is None:
            return None
        with self._settled(name):
            return function(*args)
        return None

    def does(self, name: str, *args: Any) -> bool:
        """As ``ask``, of a call that returns nothing: whether it was made."""
        function: Callable[..., Any] | None = getattr(self._library, name, None)
        if function is None:
            return False
        with self._settled(name):
            function(*args)
            return True
        return False

    def has(self, name: str) -> bool:
        """Whether the driver has a call, as far as it can be told without making it."""
        with self._settled(name):
            return name not in self._missing and bool(self._library._nvmlGetFunctionPointer(name))
        return False

    def struct(self, name: str) -> Any:
        """An empty struct of pynvml's, to be filled and passed to ``ask``."""
        return getattr(self._library, name)()

    def memory(self, handle: Any) -> Memory | None:
        """Bytes of one device, or None where the driver does not tell (integrated GPUs)."""
        if _MEMORY_V2 not in self._missing:
            with self._settled(_MEMORY_V2):
                v2 = self._library.nvmlDeviceGetMemoryInfo(handle, self._library.nvmlMemory_v2)
                return Memory(int(v2.total), int(v2.free), int(v2.reserved))
        v1 = self.ask("nvmlDeviceGetMemoryInfo", handle)
        return None if v1 is None else Memory(int(v1.total), int(v1.free), None)

    def processes(self, handle: Any) -> dict[int, int | None] | None:
        """pid -> bytes on the device (None: the driver does not tell), of every kind of process.

        None where the driver does not list processes at all. One pid may be in several lists, each
        time with all it uses: the largest figure counts, not the sum.
        """
        found: dict[int, int | None] = {}
        for kind in ("Compute", "Graphics", "MPSCompute"):
            listed = self._processes(f"nvmlDeviceGet{kind}RunningProcesses", handle)
            if listed is None and kind == "Compute":
                return None
            for pid, used_bytes in listed or ():
                known = found.get(pid)
                found[pid] = max(known or 0, used_bytes) if used_bytes is not None else known
        return found

    def process_samples(self, handle: Any, since_us: int) -> list[Sample] | None:
        """Utilisation of each process since a time of the wall clock.

        Empty where no process did anything, which the driver calls NOT_FOUND; None where it does
        not measure processes.
        """

        def fill(call: Any, count: ctypes.c_uint, array: Any) -> int:
            code = int(call(handle, array, ctypes.byref(count), ctypes.c_ulonglong(since_us)))
            if code == _NOT_FOUND:
                count.value = code = 0
            return code

        def read(written: bytes, count: int, room: int) -> list[Sample]:
            return [Sample(*each) for each in nvml_entries.samples(written, count)]

        return self._filled(
            "nvmlDeviceGetProcessUtilization", "c_nvmlProcessUtilizationSample_t", fill, read
        )

    def limits(self, handle: Any, cgroup: str) -> Limits | None:
        """What processes of a cgroup (full path of its directory) may take and do take.

        None where the driver has no such limits: it is older than r615, or the device is MIG.
        """
        struct = getattr(self._library, "c_nvmlGetMemoryLimits_v1_t", None)
        if struct is None:
            return None
        asked = struct(nameSpace=cgroup.encode())
        with self._settled(LIMITS_CALL):
            self._library.nvmlDeviceGetMemoryLimits_v1(handle, asked)
            unlimited = self._library.NVML_DEVICE_MEMORY_LIMIT_MAX
            soft, hard = int(asked.softLimit), int(asked.hardLimit)
            return Limits(
                used_bytes=int(asked.currentUsed),
                soft_bytes=None if soft == unlimited else soft,
                hard_bytes=None if hard == unlimited else hard,
            )
        return None

    def event(self, events: Any, wait_ms: int) -> Any:
        """The next event of a set, or None where none came in time."""
        with self._settled("nvmlEventSetWait_v2"):
            try:
                return self._library.nvmlEventSetWait_v2(events, wait_ms)
            except self._library.NVMLError as err:
                if err.value != _TIMEOUT:
                    raise
        return None

    @staticmethod
    def same(handle: Any, other: Any) -> bool:
        """Whether two handles name one device; only for handles of one moment."""
        return bool(_address(handle) == _address(other))

    def why_late(self, thread_id: int | None) -> str:
        """Why the thread has not returned, by the driver call that it is in, if any."""
        call = None if thread_id is None else self._calls.get(thread_id)
        return f"driver call {call} hangs" if call else "reading it takes too long"

    def _processes(self, name: str, handle: Any) -> list[tuple[int, int | None]] | None:
        """One process list, by the newest version of the call that the driver has."""

        def fill(call: Any, count: ctypes.c_uint, array: Any) -> int:
            return int(call(handle, ctypes.byref(count), array))

        for version in _LIST_VERSIONS:
            if (call := name + version) in self._missing:
                continue
            listed = self._filled(call, "c_nvmlProcessInfo_v2_t", fill, nvml_entries.processes)
            if call not in self._missing:
                return listed
        return None

    def _filled(
        self,
        name: str,
        struct: str,
        fill: Callable[[Any, ctypes.c_uint, Any], int],
        read: Callable[[bytes, int, int], list[T]],
    ) -> list[T] | None:
        """What a call writes into an array that it is given; None where the driver lacks it.

        pynvml asks twice: how many, then which. In between processes come, and drivers that answer
        the first question with SUCCESS make it report none. So the array is brought along.
        """
        kind = getattr(self._library, struct, None)
        if kind is None:
            return None
        size = max(_FIRST_PROCESSES, self._lengths.get(name, 0) * 2)
        while size <= _MOST_PROCESSES:
            count = ctypes.c_uint(size)
            try:
                with self._settled(name):
                    buffer = (ctypes.c_ubyte * (size * nvml_entries.LONGEST_BYTES))()
                    ctypes.memset(buffer, nvml_entries.POISON, len(buffer))
                    array = (kind * size).from_buffer(buffer)
                    code = fill(self._library._nvmlGetFunctionPointer(name), count, array)
                    if code != 0:
                        raise self._library.NVMLError(code)
                    listed = min(count.value, size)
                    self._lengths[name] = max(listed, self._lengths.get(name, 0))
                    return read(bytes(buffer), listed, size)
                return None
            except _TooSmall:
                size = max(size * 2, count.value * 2)
        return None

    @contextmanager
    def _settled(self, name: str) -> Iterator[None]:
        """Turn the library's errors into ours; passes over what is merely absent."""
        thread_id = threading.get_ident()
        self._calls[thread_id] = name
        try:
            yield
        except (ValueError, OSError, ctypes.ArgumentError) as err:
            # A name that is no text, a function with other arguments than pynvml thinks.
            raise DeviceFault(f"answer of {name} cannot be read: {type(err).__name__}") from err
        except getattr(self._library, "NVMLLibraryMismatchError", ()):
            self._missing.add(
                name
            )  # how pynvml says FUNCTION_NOT_FOUND of a call without a version
            return
        except self._library.NVMLError as err:
            text = f"{err} (NVML {err.value})"
            match outcome_of(err.value):
                case Outcome.ABSENT:
                    if err.value in _NOT_HAD:
                        self._missing.add(name)
                case Outcome.NO_PERMISSION:
                    self.forbidden.add(name)
                case Outcome.STALE_HANDLE:
                    raise StaleHandle(text) from err
                case Outcome.TOO_SMALL:
                    raise _TooSmall(text) from err
                case Outcome.DRIVER_GONE:
                    raise DriverGone(text) from err
                case Outcome.NO_DRIVER:
                    raise NoDriver(text) from err
                case Outcome.DEVICE_FAULT:
                    raise (DeviceLost if err.value in _LOST else DeviceFault)(text) from err
        finally:
            self._calls.pop(thread_id, None)


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
