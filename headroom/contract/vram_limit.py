"""Parses and compares limits of GPU memory: the most that a pod may use on a device.

A limit is written like a request (``headroom.gpu/vram``), or is ``none``.
"""

from headroom.contract.annotations import (
    VRAM_LIMIT,
    Bytes,
    Share,
    VramAnnotation,
    is_auto,
    parse_vram,
)
from headroom.contract.errors import BadAnnotation

#: The text of a pod or a namespace that has no limit.
NO_LIMIT = "none"


def parse_vram_limit(text: str, key: str = VRAM_LIMIT) -> VramAnnotation | None:
    """Parse ``20Gi``, ``50%`` or ``main=20Gi,cache=2Gi``. Return None for ``none``.

    ``key`` is the annotation that errors name.
    """
    if text.strip() == NO_LIMIT:
        return None
    if is_auto(text):
        raise BadAnnotation(key, text, "is not an amount", "20Gi")
    return parse_vram(text, key)


def parse_max_vram_limit(text: str, key: str) -> Bytes | Share:
    """Parse the maximum of a namespace: one amount or share for all containers."""
    parsed = parse_vram_limit(text, key)
    if parsed is None or parsed.everywhere is None:
        raise BadAnnotation(key, text, "is not one amount or share", "20Gi")
    return parsed.everywhere


def compared(one: Bytes | Share, other: Bytes | Share) -> int | None:
    """Return a negative number if ``one`` is less than ``other``, 0 if they are equal, and a
    positive number if it is more.

    Return None for an amount and a share, because their order depends on the device.
    """
    if isinstance(one, Bytes) and isinstance(other, Bytes):
        return one.count_bytes - other.count_bytes
    if isinstance(one, Share) and isinstance(other, Share):
        return one.ppm - other.ppm
    return None
