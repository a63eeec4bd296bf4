"""Decides how much freed memory the C library may keep from the system, for either process.

Python hands every block above half a kilobyte to malloc. By default glibc gives each thread an
arena of its own, eight for each core of the machine, and raises the size from which a block is
mapped by itself to that of the largest one ever freed. Both buy speed for programs that compute in
many threads, and both leave holes: in the agent, which mostly sleeps, they were all of its growth,
seven MiB in the first ten thousand samples, and on a node with many cores there are many more
arenas; in the extender each page of a list leaves one, in the arena of the thread that read it.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_small(mapped_from_bytes: int, trimmed_from_bytes: int) -> None:
    """One arena, and what is large goes back when it is freed; before there is another thread.

    A block of ``mapped_from_bytes`` is large, and so are ``trimmed_from_bytes`` free at the end of
    the heap: below that nothing asks the system for memory again and again. Nothing where the C
    library is another than glibc, and has no such habits.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, mapped_from_bytes)
        mallopt(_M_TRIM_THRESHOLD, trimmed_from_bytes)
