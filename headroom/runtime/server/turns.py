"""Lets clients take turns at work that blocks the event loop, so that no client delays the others.

A client is identified by several keys, from the most general to the most specific, such as its
address, a namespace and a user. Turns rotate among the first keys. Within each first key, they
rotate among its second keys, and so on. So a client with many requests waits for its own requests,
while any other client waits for at most one request of each other key. The limit on connections
also limits the number of waiting requests.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

_Waiting = asyncio.Future[None]
#: Maps each key to the ring of its next keys, or to its waiting requests, oldest first. The turn of
#: the first entry comes next.
_Ring = dict[str, "_Ring | deque[_Waiting]"]


class Turns:
    """Grants one turn at a time. All methods must be called on one event loop."""

    def __init__(self) -> None:
        self._waiting: _Ring = {}
        self._is_taken = False

    @asynccontextmanager
    async def turn(self, *keys: str) -> AsyncIterator[None]:
        """Wait for a turn of the client with these keys, and hold it within the context. All
        clients must have the same number of keys."""
        if self._is_taken:
            granted: _Waiting = asyncio.get_running_loop().create_future()
            _append(self._waiting, keys, granted)
            try:
                await granted
            except asyncio.CancelledError:
                if granted.done() and not granted.cancelled():
                    self._pass_on()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Grant the turn to the next client that still waits."""
        while self._waiting:
            granted = _next(self._waiting)
            if not granted.done():
                granted.set_result(None)
                return
        self._is_taken = False


def _append(ring: _Ring, keys: Sequence[str], granted: _Waiting) -> None:
    for key in keys[:-1]:
        ring = cast(_Ring, ring.setdefault(key, {}))
    cast(deque[_Waiting], ring.setdefault(keys[-1], deque())).append(granted)


def _next(ring: _Ring) -> _Waiting:
    """Remove and return the next request. Move its keys to the end, or remove a key that has no
    requests left."""
    key, within = next(iter(ring.items()))
    del ring[key]
    granted = within.popleft() if isinstance(within, deque) else _next(within)
    if within:
        ring[key] = within
    return granted
