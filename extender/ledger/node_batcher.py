"""Batches concurrent binds per node: the holder of the node's lock serves all queued requests.

Compare-and-swap decides between replicas. Inside one replica, binds that race for the same GPUNode
would only cause conflicts, and separate writes of one object would cost more than one write.
"""

from asyncio import Lock
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from contract.gpunode import GPUNode


class Want(Protocol):
    #: Set when the request was served, by any holder of the lock.
    done: bool


W = TypeVar("W", bound=Want)


@dataclass(slots=True)
class Turn(Generic[W]):
    """The state kept for a node while at least one request for it is pending."""

    lock: Lock = field(default_factory=Lock)
    #: Requests that hold the lock or wait for it.
    takers: int = 0
    #: Requests that no holder of the lock has taken yet.
    waiting: list[W] = field(default_factory=list)
    #: Whether the lock was held before, and the GPUNode that the last holder wrote, if known.
    used: bool = False
    gpunode: GPUNode | None = None


class NodeBatcher(Generic[W]):
    """Calls ``do`` with all queued requests of a node, one call per node at a time.

    ``do`` must complete each request that it receives, also if an error occurs.
    """

    def __init__(self, do: Callable[[str, Turn[W], list[W]], Awaitable[None]]) -> None:
        self._do = do
        self._turns: dict[str, Turn[W]] = {}

    def takers(self, node: str) -> int:
        """Return the number of pending requests for the node."""
        turn = self._turns.get(node)
        return turn.takers if turn else 0

    async def take(self, node: str, want: W) -> None:
        """Return when the request is done."""
        want.done = False
        turn = self._turns.setdefault(node, Turn())
        turn.takers += 1
        turn.waiting.append(want)
        try:
            async with turn.lock:
                if not want.done:
                    # If the holder that took this request was cancelled, no other holder has it.
                    together, turn.waiting = turn.waiting or [want], []
                    await self._do(node, turn, together)
        finally:
            turn.takers -= 1
            if not turn.takers:
                del self._turns[node]
