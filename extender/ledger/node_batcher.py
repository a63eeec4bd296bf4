"""Batches concurrent binds per node. The request that holds the node's lock serves all queued
requests.

Between replicas, compare-and-swap decides which write succeeds. Within one replica, separate writes
of the same GPUNode would only cause conflicts, and would cost more than a single write.
"""

from asyncio import Lock
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from headroom.contract.gpunode import GPUNode


class Request(Protocol):
    """A request for one node."""

    #: True after a holder of the lock has served the request.
    done: bool


R = TypeVar("R", bound=Request)


@dataclass(slots=True)
class NodeQueue(Generic[R]):
    """The state kept for a node while at least one request for it is pending."""

    lock: Lock = field(default_factory=Lock)
    #: Requests that hold the lock or wait for it.
    requests: int = 0
    #: Requests that no holder of the lock has taken yet.
    queued: list[R] = field(default_factory=list)
    #: True if an earlier request held the lock. If so, ``gpunode`` is the object that the last
    #: holder wrote, or None if it wrote nothing or the result of its write is unknown.
    used: bool = False
    gpunode: GPUNode | None = None


class NodeBatcher(Generic[R]):
    """Calls ``serve`` with all queued requests of a node, one call per node at a time.

    ``serve`` must complete each request that it receives, even if an error occurs.
    """

    def __init__(self, serve: Callable[[str, NodeQueue[R], list[R]], Awaitable[None]]) -> None:
        self._serve = serve
        self._queues: dict[str, NodeQueue[R]] = {}

    async def serve(self, node: str, request: R) -> None:
        """Return when the request is done."""
        request.done = False
        queue = self._queues.setdefault(node, NodeQueue())
        queue.requests += 1
        queue.queued.append(request)
        try:
            async with queue.lock:
                if not request.done:
                    # If the holder that took this request was cancelled, no other holder has it.
                    batch, queue.queued = queue.queued or [request], []
                    await self._serve(node, queue, batch)
        finally:
            queue.requests -= 1
            if not queue.requests:
                del self._queues[node]
