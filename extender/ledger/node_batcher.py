"""Who does what several want done about one node at once: the first that has its turn, for all that
wait for theirs.

Compare-and-swap decides between replicas; racing ourselves would only cost, and so would a write of
the same object for each of those who wait.
"""

from asyncio import Lock
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from contract.gpunode import GPUNode


class Want(Protocol):
    #: Whether it was done, by whoever had the turn.
    done: bool


W = TypeVar("W", bound=Want)


@dataclass(slots=True)
class Turn(Generic[W]):
    """What is kept of a node while anybody wants anything there."""

    lock: Lock = field(default_factory=Lock)
    #: Who has it, and who waits for it.
    takers: int = 0
    #: What nobody has begun to do.
    waiting: list[W] = field(default_factory=list)
    #: Whether anybody has had it, and the node's object as the last of them left it, if known.
    used: bool = False
    gpunode: GPUNode | None = None


class NodeBatcher(Generic[W]):
    """``do`` sees to it that all it is given is done, whatever goes wrong; one call for a node at a
    time."""

    def __init__(self, do: Callable[[str, Turn[W], list[W]], Awaitable[None]]) -> None:
        self._do = do
        self._turns: dict[str, Turn[W]] = {}

    def takers(self, node: str) -> int:
        """How many want something done there now."""
        turn = self._turns.get(node)
        return turn.takers if turn else 0

    async def take(self, node: str, want: W) -> None:
        """Return when it was done."""
        want.done = False
        turn = self._turns.setdefault(node, Turn())
        turn.takers += 1
        turn.waiting.append(want)
        try:
            async with turn.lock:
                if not want.done:
                    # It is in nobody's hands where who took it was cancelled.
                    together, turn.waiting = turn.waiting or [want], []
                    await self._do(node, turn, together)
        finally:
            turn.takers -= 1
            if not turn.takers:
                del self._turns[node]
