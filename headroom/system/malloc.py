"""Limits how much freed memory the C library keeps, in the agent and in the extender.

Python allocates every block above 512 bytes with malloc. By default glibc has up to eight arenas
for each core, and it maps a block separately only if the block is larger than every mapped block
freed before. Both defaults speed up programs with many threads, and both fragment the heap. They
caused all growth of the agent: 7 MiB in the first 10,000 samples, more on nodes with many cores. In
the extender each page of a list left a hole in the arena of the thread that read it.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_small(mapped_from_bytes: int, trimmed_from_bytes: int) -> None:
    """Use one arena, and return large freed blocks to the system immediately.

    Call it before other threads start. Blocks of at least ``mapped_from_bytes`` are mapped
    separately. The heap shrinks when ``trimmed_from_bytes`` are free at its end; if the value is
    too small, the process requests the same memory again and again. Without glibc, this function
    does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, mapped_from_bytes)
        mallopt(_M_TRIM_THRESHOLD, trimmed_from_bytes)
