"""Which threads have begun since, by the names that their owner gives them.

Never how many there are in all: the runner of the tests and servers beside a test start some of
their own whenever they like.
"""

import threading
from collections.abc import Callable


def begun_since(prefix: str) -> Callable[[], list[str]]:
    """A count from now on: the sorted names, of those that live, that begin with ``prefix``."""
    before = set(threading.enumerate())

    def begun() -> list[str]:
        since = set(threading.enumerate()) - before
        return sorted(each.name for each in since if each.name.startswith(prefix))

    return begun
