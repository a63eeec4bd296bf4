"""On which nodes something changed for the better, and when: by the generation of the first
snapshot that shows it. Only the last time of each node is kept."""

from collections.abc import Iterator


class Rooms:
    def __init__(self) -> None:
        #: The latest comes last.
        self._in: dict[str, int] = {}

    def note(self, node: str, generation: int) -> None:
        self._in.pop(node, None)
        self._in[node] = generation

    def lose(self, node: str) -> None:
        self._in.pop(node, None)

    def of(self, node: str) -> int:
        return self._in.get(node, 0)

    @property
    def latest(self) -> int:
        return next(reversed(self._in.values()), 0)

    def since(self, generation: int) -> Iterator[str]:
        """The nodes on which it was later than that, the latest first."""
        for node in reversed(self._in):
            if self._in[node] <= generation:
                return
            yield node
