"""What one container asks of another allocator, as an amount and a number of devices of ours.

Their units differ, and none is written down in the manifest (facts: ``gpu-memory`` and ``gpumem``
are MiB, ``aliyun.com/gpu-mem`` is whatever the plugin's ``--memory-unit`` says). Figures are read
exactly, as integers; what does not come out even is rounded up, so that a pod never gets less.
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
#: No device has so much: a figure in another unit, or one that has a unit of its own.
TOO_MANY_BYTES = 1 << 40
#: Bytes -> name, and how many of it are 8 GiB.
_UNITS = {1 << 30: ("GiB", 8), MIB: ("MiB", 8192)}
_DECIMAL = re.compile(r"[0-9]{0,4}(?:\.[0-9]{0,18})?", re.ASCII)


class Unclear(ValueError):
    """A value that cannot be read: why, in half a sentence."""


@dataclass(frozen=True, slots=True)
class TheirAsk:
    """``amount`` on each of ``devices`` devices."""

    amount: Bytes | Share
    devices: int = 1


def count(value: object) -> int:
    """A number of devices, from 1."""
    text = str(value).strip()
    if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= MAX_DEVICES_ASKED:
        raise Unclear(f"{shortened(text)} is no number of devices, right is, for example, 1")
    return int(text)


def in_units(value: object, unit_bytes: int) -> Bytes | None:
    """So many units of memory; None for zero, which asks for nothing."""
    text = str(value).strip()
    try:
        units = parse_bytes(text)
    except BadQuantity as err:
        raise Unclear(str(err)) from err
    count_bytes = units * unit_bytes
    if unit_bytes > 1 and count_bytes >= TOO_MANY_BYTES:
        name, eight = _UNITS[unit_bytes]
        raise Unclear(
            f"{shortened(text)} {name} is more than any device has; the figure counts {name}, "
            f"right is, for example, {eight}"
        )
    return _amount(count_bytes, text)


def quantity(value: object) -> Bytes | None:
    """A Kubernetes quantity of bytes, as in 4Gi."""
    return in_units(value, 1)


def fraction(value: object) -> Share:
    """``0.5`` of a device."""
    return _share(value, PPM, "a fraction above 0 and up to 1, right is, for example, 0.5")


def percentage(value: object) -> Share:
    """``50`` hundredths of a device."""
    return _share(
        value, PPM // 100, "a percentage above 0 and up to 100, right is, for example, 50"
    )


def _amount(count_bytes: int, text: str) -> Bytes | None:
    if count_bytes < 0 or count_bytes > MAX_DEVICE_BYTES:
        raise Unclear(f"{shortened(text)} is not what any device has")
    return Bytes(count_bytes) if count_bytes else None


def _share(value: object, unit_ppm: int, right: str) -> Share:
    text = str(value).strip()
    if not _DECIMAL.fullmatch(text) or not any(c.isdigit() for c in text):
        raise Unclear(f"{shortened(text)} is not {right}")
    ppm = int((Decimal(text) * unit_ppm).to_integral_value(ROUND_CEILING))
    if not 0 < ppm <= PPM:
        raise Unclear(f"{shortened(text)} is not {right}")
    return Share(ppm)
