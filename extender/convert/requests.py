"""Converts a container's request to another allocator to an amount and a number of devices.

Their units differ, and a manifest does not contain them: ``gpu-memory`` and ``gpumem`` are MiB, and
``aliyun.com/gpu-mem`` has the unit of the plugin's flag ``--memory-unit``. Values are computed with
integers and rounded up, so that a pod never gets less memory.
"""

import re
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal

from contract.annotations import PPM, Bytes, Share
from contract.errors import BadQuantity, shortened
from contract.gpunode import MAX_DEVICE_BYTES
from contract.quantity import parse_bytes

MIB = 1 << 20
MAX_DEVICES_ASKED = 1024
#: More memory than any device has: the value must be in another unit, or have its own unit.
TOO_MANY_BYTES = 1 << 40
#: Bytes of a unit -> its name, and 8 GiB in this unit.
_UNITS = {1 << 30: ("GiB", 8), MIB: ("MiB", 8192)}
_DECIMAL = re.compile(r"[0-9]{0,4}(?:\.[0-9]{0,18})?", re.ASCII)


class Unreadable(ValueError):
    """A value that cannot be read; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class TheirAsk:
    """A request for ``amount`` on each of ``devices`` devices."""

    amount: Bytes | Share
    devices: int = 1


def count(value: object) -> int:
    """Read a number of devices, at least 1."""
    text = str(value).strip()
    if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= MAX_DEVICES_ASKED:
        raise Unreadable(f"{shortened(text)} is not a number of devices. Example: 1")
    return int(text)


def in_units(value: object, unit_bytes: int) -> Bytes | None:
    """Read a number of units of memory; None for zero, which requests nothing."""
    text = str(value).strip()
    try:
        units = parse_bytes(text)
    except BadQuantity as err:
        raise Unreadable(str(err)) from err
    count_bytes = units * unit_bytes
    if unit_bytes > 1 and count_bytes >= TOO_MANY_BYTES:
        name, eight = _UNITS[unit_bytes]
        raise Unreadable(
            f"{shortened(text)} {name} is more than any device has; the value is in {name}. "
            f"Example: {eight}"
        )
    return _amount(count_bytes, text)


def quantity(value: object) -> Bytes | None:
    """Read a Kubernetes quantity of bytes, such as 4Gi."""
    return in_units(value, 1)


def fraction(value: object) -> Share:
    """Read a fraction of a device, such as 0.5."""
    return _share(value, PPM, "a fraction above 0 and up to 1. Example: 0.5")


def percentage(value: object) -> Share:
    """Read a percentage of a device, such as 50."""
    return _share(value, PPM // 100, "a percentage above 0 and up to 100. Example: 50")


def _amount(count_bytes: int, text: str) -> Bytes | None:
    if count_bytes < 0 or count_bytes > MAX_DEVICE_BYTES:
        raise Unreadable(f"{shortened(text)} is not an amount that any device has")
    return Bytes(count_bytes) if count_bytes else None


def _share(value: object, unit_ppm: int, expected: str) -> Share:
    text = str(value).strip()
    if not _DECIMAL.fullmatch(text) or not any(c.isdigit() for c in text):
        raise Unreadable(f"{shortened(text)} is not {expected}")
    ppm = int((Decimal(text) * unit_ppm).to_integral_value(ROUND_CEILING))
    if not 0 < ppm <= PPM:
        raise Unreadable(f"{shortened(text)} is not {expected}")
    return Share(ppm)
