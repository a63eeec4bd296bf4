"""What the process does with memory that it is done with, so that no call waits for it.

The C library gives back what is large as soon as it is freed, and each answer to kube-scheduler
would ask for it again: a third of a millisecond for 5,000 nodes.

A full collection of garbage looks at every list and set of what is held, for a tenth of a second
and more in which no call is answered, and finds next to nothing: what is held is freed when it is
replaced. So what was there at the start is left out of it for good, and all else is looked at when
nobody calls, or once an hour.
"""

import asyncio
import gc
import time

from contract.heap import keep_small
from extender.web.calls import Calls

#: More than kube-scheduler sends and is answered, which is to cost no call to the system, and less
#: than a page of a list.
_LARGE_BYTES = 1 << 20
_SPARE_BYTES = 8 << 20
#: Of the collector: containers made before it looks at the youngest, and how often it does before
#: it looks at those that survived one look; a millisecond's work. It never looks at all by itself.
_THRESHOLDS = (700, 5, 1 << 30)
#: After so long without a call the next one is hardly due this very moment.
_LULL_S = 5.0
_AT_LEAST_S, _AT_MOST_S = 600.0, 3600.0


def keep_what_answers_need() -> None:
    """Before there is another thread."""
    keep_small(_LARGE_BYTES, _SPARE_BYTES)


async def collect_in_lulls(
    calls: Calls,
    lull_s: float = _LULL_S,
    at_least_s: float = _AT_LEAST_S,
    at_most_s: float = _AT_MOST_S,
) -> None:
    """For ever; what is held now is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    collected_s, begun = time.monotonic(), calls.begun
    while True:
        await asyncio.sleep(lull_s)
        quiet, begun = calls.begun == begun and not calls.under_way, calls.begun
        since_s = time.monotonic() - collected_s
        if since_s >= (at_least_s if quiet else at_most_s):
            gc.collect()
            collected_s = time.monotonic()
