"""Decides how long the entries are that a driver wrote into a buffer of ours. Pure.

Drivers disagree about the layout of one and the same call, and none reports which one it uses (the
table in docs/agent.md). So the buffer is filled with a pattern first: what the driver has not
written tells where its last entry ends. This is checked with every list, not once: an empty list
shows nothing, and a wrong length reads as other processes with other memory.
"""

import struct
from collections.abc import Iterator

#: No process id, and no byte of a figure that a driver writes.
POISON = 0xA5
#: Length of an entry of a process list -> process id and bytes, at the same place in all of them.
_PROCESSES = {
    16: struct.Struct("<I4xQ"),
    24: struct.Struct("<I4xQ8x"),
    32: struct.Struct("<I4xQ16x"),
}
LONGEST_BYTES = max(_PROCESSES)
_NOT_AVAILABLE = (1 << 64) - 1


class UnknownLayout(ValueError):
    """Nothing that a driver is known to write."""


def processes(written: bytes, count: int, room: int) -> list[tuple[int, int | None]]:
    """Process id and bytes (None: not known to the driver) of the first ``count`` entries.

    ``written`` was poisoned, and has ``LONGEST_BYTES`` for each of the ``room`` entries that the
    driver was told of. Raises ``UnknownLayout``.
    """
    entry_bytes = _entry_bytes(written, count, room)
    entries = _PROCESSES[entry_bytes].iter_unpack(written[: count * entry_bytes])
    return [(pid, None if used == _NOT_AVAILABLE else used) for pid, used in entries]


def samples(written: bytes, count: int) -> Iterator[tuple[int, int, int]]:
    """Process id, time (microseconds) and percent of the SMs, of utilisation samples."""
    return struct.Struct("<I4xQI12x").iter_unpack(written[: count * 32])


def _entry_bytes(written: bytes, count: int, room: int) -> int:
    for entry_bytes in _PROCESSES:
        if _is_end(written, count * entry_bytes, room * entry_bytes):
            return entry_bytes
    raise UnknownLayout("its entries have none of the known lengths")


def _is_end(written: bytes, end: int, room_end: int) -> bool:
    """Whether nothing was written from ``end`` on, or zeros up to ``room_end``: some drivers clear
    the whole array first."""
    is_cleared = written.count(0, end, room_end) == room_end - end
    return _is_untouched(written, end) or (is_cleared and _is_untouched(written, room_end))


def _is_untouched(written: bytes, start: int) -> bool:
    return written.count(POISON, start) == len(written) - start
