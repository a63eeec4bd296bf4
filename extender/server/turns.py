"""Lets clients take turns at work that blocks the event loop, so that none delays all others.

Turns go round the addresses, and for one address round its users. So a client with many requests
waits for its own, and any other client waits for at most one request of each address and user. The
number of waiting requests is limited by the number of connections.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Grants one turn at a time; all methods must be called in one event loop."""

    def __init__(self) -> None:
        #: Address -> user -> waiting requests, the oldest first. Who is next comes first in each.
        self._waiting: dict[str, dict[str, deque[asyncio.Future[None]]]] = {}
        self._is_taken = False

    @asynccontextmanager
    async def turn(self, address: str, user: str) -> AsyncIterator[None]:
        """Wait for a turn of this client, and hold it."""
        if self._is_taken:
            granted = asyncio.get_running_loop().create_future()
            users = self._waiting.setdefault(address, {})
            users.setdefault(user, deque()).append(granted)
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
            address, users = next(iter(self._waiting.items()))
            user, requests = next(iter(users.items()))
            granted = requests.popleft()
            # A user and an address that had a turn go to the end of the queue.
            del users[user], self._waiting[address]
            if requests:
                users[user] = requests
            if users:
                self._waiting[address] = users
            if not granted.done():
                granted.set_result(None)
                return
        self._is_taken = False
