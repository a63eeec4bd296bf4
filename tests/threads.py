"""Finds threads that were started since a point in time, by the prefix of their names.

The total number of threads is not reliable: the test runner and servers start threads at any time.
"""

import threading
from collections.abc import Callable


def begun_since(prefix: str) -> Callable[[], list[str]]:
    """Return a function that returns the sorted names of running threads with this prefix.

    Threads that run now are not included.
    """
    before = set(threading.enumerate())

    def begun() -> list[str]:
        since = set(threading.enumerate()) - before
        return sorted(each.name for each in since if each.name.startswith(prefix))

    return begun
