"""The nodes that must be weighed again, in the order in which they changed."""

from collections.abc import Iterable


class WeighingQueue:
    """``unlisted``: kinds that must be listed before any node is weighed. Each further list would
    mark all nodes dirty again."""

    def __init__(self, unlisted: Iterable[type]) -> None:
        self.unlisted = set(unlisted)
        #: Whether all these kinds are listed and all nodes have been weighed since.
        self.begun = not self.unlisted
        self._dirty: dict[str, None] = {}
        #: Nodes whose weighing raised an exception.
        self._failed: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._dirty

    @property
    def is_due(self) -> bool:
        """Whether a node can be weighed now."""
        return bool(self._dirty) and not self.unlisted

    def add(self, *names: str) -> None:
        self._dirty.update(dict.fromkeys(names))

    def pop(self) -> str:
        """Remove and return the first node."""
        name = next(iter(self._dirty))
        del self._dirty[name]
        return name

    def set_aside(self) -> dict[str, None]:
        """Empty the queue and return its nodes, for ``put_back``; none until all is listed."""
        if self.unlisted:
            return {}
        aside, self._dirty = self._dirty, {}
        return aside

    def put_back(self, aside: dict[str, None]) -> None:
        """Queue these nodes before those that were added since."""
        aside.update(self._dirty)
        self._dirty = aside

    def listed(self, kind: type) -> None:
        self.unlisted.discard(kind)
        self.update_begun()  # in a cluster without nodes nothing is ever weighed

    def update_begun(self) -> None:
        self.begun = self.begun or not (self.unlisted or self._dirty)

    def fail(self, name: str) -> None:
        """Record that the weighing of this node raised an exception."""
        self._failed[name] = None

    def retry_failed(self) -> None:
        """Queue the nodes whose weighing raised an exception."""
        self._dirty.update(self._failed)
        self._failed.clear()
