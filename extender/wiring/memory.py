"""What the process does with memory that it is done with, so that no call waits for it.

The C library gives back what is large as soon as it is freed, and each answer to kube-scheduler
would ask for it again: a third of a millisecond for 5,000 nodes.

A collection of garbage looks at every list and set of what is held, or that is new, for a
millisecond to a third of a second in which no call is answered, and finds next to nothing: what is
held is freed when it is replaced. So the collector does nothing by itself. What was there at the
start is left out of it for good, and all else is looked at when something is new: once nobody
calls, or after an hour, and at once when it is much.
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
#: Containers made since the last collection and not freed, before there is another one: what came
#: to be held, and garbage, of which that would be some 50 MB.
_MOST_NEW = 500_000
#: So few are left alone: at most some 5 MB of garbage.
_SOME_NEW = 50_000
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
    gc.disable()
    collected_s, begun = time.monotonic(), calls.begun
    try:
        while True:
            await asyncio.sleep(lull_s)
            quiet, begun = calls.begun == begun and not calls.under_way, calls.begun
            since_s = time.monotonic() - collected_s
            is_due, new = since_s >= (at_least_s if quiet else at_most_s), gc.get_count()[0]
            if (is_due and new > _SOME_NEW) or new > _MOST_NEW:
                gc.collect()
                collected_s = time.monotonic()
    finally:
        gc.enable()
