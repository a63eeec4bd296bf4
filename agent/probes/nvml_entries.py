"""Decodes process lists and samples that the driver writes into a buffer. Pure.

Drivers use different entry sizes for the same call, and none reports which one it uses (the table
in docs/agent.md). So the buffer is filled with a pattern first, and the untouched part shows where
the last entry ends. Every list is checked, not only the first: an empty list shows nothing, and a
wrong size would yield other processes with other memory.
"""

import struct
from collections.abc import Iterator

#: Fill pattern: entries that a driver writes do not consist of this byte.
POISON = 0xA5
#: Size of an entry of a process list in bytes -> its layout: process id, bytes used.
_PROCESSES = {
    16: struct.Struct("<I4xQ"),
    24: struct.Struct("<I4xQ8x"),
    32: struct.Struct("<I4xQ16x"),
}
LONGEST_BYTES = max(_PROCESSES)
_NOT_AVAILABLE = (1 << 64) - 1


class UnknownLayout(ValueError):
    """The entries have a size that no known driver writes."""


def processes(written: bytes, count: int, room: int) -> list[tuple[int, int | None]]:
    """Return process id and bytes (None: unknown to the driver) of the first ``count`` entries.

    ``written`` was filled with ``POISON`` and has ``LONGEST_BYTES`` for each of ``room`` entries,
    the array length passed to the driver. Raises ``UnknownLayout``.
    """
    entry_bytes = _entry_bytes(written, count, room)
    entries = _PROCESSES[entry_bytes].iter_unpack(written[: count * entry_bytes])
    return [(pid, None if used == _NOT_AVAILABLE else used) for pid, used in entries]


def samples(written: bytes, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield process id, time (microseconds) and SM utilisation (percent) of each sample."""
    return struct.Struct("<I4xQI12x").iter_unpack(written[: count * 32])


def _entry_bytes(written: bytes, count: int, room: int) -> int:
    for entry_bytes in _PROCESSES:
        if _is_end(written, count * entry_bytes, room * entry_bytes):
            return entry_bytes
    raise UnknownLayout("its entries have none of the known lengths")


def _is_end(written: bytes, end: int, room_end: int) -> bool:
    """Return whether the driver wrote nothing from ``end`` on, or only zeros up to ``room_end``.

    Some drivers clear the whole array first.
    """
    is_cleared = written.count(0, end, room_end) == room_end - end
    return _is_untouched(written, end) or (is_cleared and _is_untouched(written, room_end))


def _is_untouched(written: bytes, start: int) -> bool:
    return written.count(POISON, start) == len(written) - start
