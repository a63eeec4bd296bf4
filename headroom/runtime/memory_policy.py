"""Configures memory allocation and garbage collection of a process that holds a cluster's state.

A full garbage collection visits every object that can refer to other objects. With 5,000 nodes, it
blocks the event loop for up to a third of a second and frees almost nothing, because the state has
no cycles. So young objects are collected less often, the listed objects are frozen at the start,
and a full collection runs only once an hour.
"""

import asyncio
import gc

from headroom.system.malloc import keep_small

#: Blocks of at least this size are mapped separately, and returned to the system when they are
#: freed. Calls of kube-scheduler and their answers are smaller, so they need no system call. Pages
#: of a list are larger.
_LARGE_BYTES = 1 << 20
_SPARE_BYTES = 8 << 20

#: The youngest generation is collected after this many new objects, which takes less than 1 ms. The
#: next generation is collected after this many collections of the youngest, which takes less than
#: 10 ms.
_YOUNG_OBJECTS, _YOUNG_COLLECTIONS = 10_000, 10
#: A threshold that is never reached, because the oldest generation is collected once an hour
#: instead.
_NEVER = 1_000_000
_FULL_COLLECTION_S = 3600.0


def limit_heap() -> None:
    """Keep the heap compact, and collect no old objects while modules are imported and the lists
    arrive.

    Call it before the imports of the process, and before another thread starts.
    """
    keep_small(_LARGE_BYTES, _SPARE_BYTES)
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_COLLECTIONS, _NEVER)


async def collect_garbage(every_s: float = _FULL_COLLECTION_S) -> None:
    """Freeze the listed objects, then run a full collection once an hour until cancelled."""
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
