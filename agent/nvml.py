"""One gate for every driver call: decides what an NVML error code means to us.

NVML knows some thirty error codes and callers elsewhere guess at each of them. Here every code has
exactly one of seven outcomes, and what leaves the gate is a value, ``None`` (absent) or one of

    NvmlError
    ├── NoDriver       no NVIDIA driver here: not a GPU node, or not one yet; asked again later
    ├── DriverGone     the driver went or was replaced under us. pynvml caches function pointers and
    │                  never unloads the library, so only a new process can talk to the new driver
    ├── DeviceFault    this device cannot be trusted; the others can
    └── StaleHandle    the handle names nothing any more: resolve it again by UUID
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any


class NvmlError(Exception):
    """Base of what the gate raises."""


class NoDriver(NvmlError):
    pass


class DriverGone(NvmlError):
    pass


class DeviceFault(NvmlError):
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

_FIRST_PROCESSES = 64
_MOST_PROCESSES = 1 << 14


def outcome_of(code: int) -> Outcome:
    return OUTCOMES.get(code, Outcome.DEVICE_FAULT)


@dataclass(frozen=True, slots=True)
class Memory:
    """What the driver says of one device, in bytes, as it says it."""

    total_bytes: int
    free_bytes: int
    #: Kept by the driver; None where it cannot tell (older than r510). Never derived from `used`,
    #: which the two versions of the call define differently.
    reserved_bytes: int | None


class Gate:
    """The only thing in the agent that touches NVML.

    ``library`` is the module ``pynvml`` of nvidia-ml-py, or anything that offers the same names;
    left out, it is imported by ``start``, so that the agent can be imported where it is missing.
    """

    def __init__(self, library: Any = None) -> None:  # pynvml has no types
        self._library = library
        self._started = False
        #: Calls that the driver refused for want of a privilege, since the reader last cleared it.
        self.forbidden: set[str] = set()

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
        if not self._started:
            why = "permission to open /dev/nvidiactl" if self.forbidden else "nvmlInitWithFlags"
            raise NoDriver(f"NVML cannot be initialised: no {why}")

    def ask(self, name: str, *args: Any) -> Any:
        """Call ``name`` of pynvml; None where the driver, the device or our rights lack it."""
        function: Callable[..., Any] | None = getattr(self._library, name, None)
        if function is None:
            return None
        with self._settled(name):
            return function(*args)
        return None

    def memory(self, handle: Any) -> Memory | None:
        """Bytes of one device, or None where the driver does not tell (integrated GPUs)."""
        v1 = self.ask("nvmlDeviceGetMemoryInfo", handle)
        if v1 is None:
            return None
        v2 = self.ask("nvmlDeviceGetMemoryInfo", handle, self._library.nvmlMemory_v2)
        return Memory(
            total_bytes=int(v1.total),
            free_bytes=int(v1.free),
            reserved_bytes=None if v2 is None else int(v2.reserved),
        )

    def processes(self, handle: Any) -> dict[int, int | None] | None:
        """pid -> bytes on the device (None: the driver does not tell), of every kind of process.

        None where the driver does not list processes at all. One pid may be in several lists, each
        time with all it uses: the largest figure counts, not the sum.
        """
        found: dict[int, int | None] = {}
        for kind in ("Compute", "Graphics", "MPSCompute"):
            listed = self._list(f"nvmlDeviceGet{kind}RunningProcesses", handle)
            if listed is None and kind == "Compute":
                return None
            for pid, used_bytes in listed or ():
                known = found.get(pid)
                found[pid] = max(known or 0, used_bytes) if used_bytes is not None else known
        return found

    def _list(self, name: str, handle: Any) -> list[tuple[int, int | None]] | None:
        """One process list, by the newest version of the call that the driver has.

        pynvml asks twice: how many, then which. In between processes come, and drivers that answer
        the first question with SUCCESS make it report none. So the array is brought along.
        """
        for version in ("_v3", "_v2"):
            size = _FIRST_PROCESSES
            while size <= _MOST_PROCESSES:
                count = ctypes.c_uint(size)
                try:
                    with self._settled(name + version):
                        array = (self._library.c_nvmlProcessInfo_v2_t * size)()
                        call = self._library._nvmlGetFunctionPointer(name + version)
                        code = call(handle, ctypes.byref(count), array)
                        if code != 0:
                            raise self._library.NVMLError(code)
                        return [_process(array[i]) for i in range(min(count.value, size))]
                    break  # absent in this version
                except _TooSmall:
                    size = max(size * 2, count.value * 2)
        return None

    @contextmanager
    def _settled(self, name: str) -> Iterator[None]:
        """Turn the library's errors into ours; passes over what is merely absent."""
        try:
            yield
        except self._library.NVMLError as err:
            text = f"{err} (NVML {err.value})"
            match outcome_of(err.value):
                case Outcome.ABSENT:
                    return
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
                    raise DeviceFault(text) from err


def _process(info: Any) -> tuple[int, int | None]:
    not_available = ctypes.c_ulonglong(-1).value
    used_bytes = int(info.usedGpuMemory)
    return int(info.pid), None if used_bytes == not_available else used_bytes
