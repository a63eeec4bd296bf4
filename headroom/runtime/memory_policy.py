"""Memory policy of a process that holds a cluster's state.

A full garbage collection visits every list, dict and other object that can refer to others. With
5,000 nodes that blocks the event loop for up to a third of a second, and frees next to nothing,
because the state has no cycles. So young objects are collected with a larger threshold, the listed
objects are frozen at the start, and a full collection runs once an hour.
"""

import asyncio
import gc

from headroom.host.malloc import keep_small

#: Blocks of this size are mapped separately, and returned to the system when they are freed. It is
#: larger than a call of kube-scheduler and its answer, which therefore need no system call, and
#: smaller than a page of a list.
_LARGE_BYTES = 1 << 20
_SPARE_BYTES = 8 << 20

#: The youngest generation is collected after this many new objects (under 1 ms), and the next one
#: after this many collections of the youngest (under 10 ms).
_YOUNG_OBJECTS, _YOUNG_COLLECTIONS = 10_000, 10
#: Never reached: the oldest generation is collected by the clock.
_NEVER = 1_000_000
_FULL_COLLECTION_S = 3600.0


def limit_heap() -> None:
    """Keep the heap compact and collect no old objects while the lists arrive.

    Call it before another thread starts.
    """
    keep_small(_LARGE_BYTES, _SPARE_BYTES)
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_COLLECTIONS, _NEVER)


async def collect_garbage(every_s: float = _FULL_COLLECTION_S) -> None:
    """Freeze what was listed, then collect everything once an hour until cancelled."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_COLLECTIONS, _NEVER)
    try:
        while True:
            await asyncio.sleep(every_s)
            gc.collect()
    finally:
        gc.set_threshold(*before)
