"""Gives each error code of NVML exactly one meaning. The functions are pure.

NVML has about thirty error codes. A failed call of ``Gate`` returns ``None`` if the driver or the
device does not support the call, or if the agent lacks the permission. Otherwise it raises one of
these errors:

    NvmlError
    ├── NoDriver       no NVIDIA driver here: not a GPU node, or not yet; tried again later
    ├── DriverGone     the driver was unloaded or replaced while the agent runs. pynvml caches
    │                  function pointers and never unloads the library, so only a new process can
    │                  use the new driver
    ├── DeviceFault    this device cannot be trusted; the others can
    │   └── DeviceLost     it fell off the bus or needs a reset, whichever call reports that
    └── StaleHandle    the handle is not valid any more: resolve it again by UUID
"""

from enum import Enum

from agent.probes.cause import Cause
from headroom.contract.gpunode import HealthCode


class NvmlError(Exception):
    """Base class of all errors that ``Gate`` raises. ``code`` is NVML's error code, if there is
    one."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.cause = Cause(text, _HEALTH_CODES.get(code, "nvml"))


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


class TooSmall(NvmlError):
    """The array passed to the driver was too short. ``Gate`` handles it and never raises it."""


#: Health code of a device for each NVML error code. All other errors have the health code "nvml".
_HEALTH_CODES: dict[int | None, HealthCode] = {15: "lost", 16: "reset_required"}


class UnknownLayout(ValueError):
    """The entries of a list have a size that no known driver uses."""


class Outcome(Enum):
    """The possible meanings of a failed driver call."""

    ABSENT = "absent"
    NO_PERMISSION = "no permission"
    STALE_HANDLE = "stale handle"
    TOO_SMALL = "too small"
    DEVICE_FAULT = "device fault"
    DRIVER_GONE = "driver gone"
    NO_DRIVER = "no driver"


#: Outcome of each NVML error code. All other codes (lost, reset required, timeout, unknown, codes
#: of future drivers) are faults of the device, because a response that the agent cannot interpret
#: is no reason to trust the device.
OUTCOMES = {
    0: Outcome.ABSENT,  # pynvml raises "SUCCESS" if a sizing call found nothing
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
    28: Outcome.ABSENT,  # GPU_NOT_FOUND: the node has no GPU
}

#: GPU_IS_LOST and RESET_REQUIRED.
_LOST = _HEALTH_CODES.keys()
#: FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH and DEPRECATED, which mean that this driver version
#: does not support the call.
UNSUPPORTED = {13, 25, 26}

_ERRORS = {
    Outcome.STALE_HANDLE: StaleHandle,
    Outcome.TOO_SMALL: TooSmall,
    Outcome.DRIVER_GONE: DriverGone,
    Outcome.NO_DRIVER: NoDriver,
    Outcome.DEVICE_FAULT: DeviceFault,
}


def outcome_of(code: int) -> Outcome:
    return OUTCOMES.get(code, Outcome.DEVICE_FAULT)


def error_of(code: int) -> type[NvmlError] | None:
    """Return the error that is raised for a code, or None if the call counts as absent."""
    return DeviceLost if code in _LOST else _ERRORS.get(outcome_of(code))
