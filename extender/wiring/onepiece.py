"""An answer goes out in one piece: each write wakes up whoever reads, who could do nothing with the
head of an answer alone."""

import asyncio
from typing import Any

_HEAD, _INTERIM = b"HTTP/1.1 ", b"HTTP/1.1 1"


class OnePiece:
    """A connection's transport that holds the head of an answer back until more of it comes, or
    ``flush`` says that there is no more. Not for answers that are made slowly."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""

    def write(self, data: bytes) -> None:
        if not self._head and data.startswith(_HEAD) and not data.startswith(_INTERIM):
            self._head = data
            return
        head, self._head = self._head, b""
        self._transport.write(head + data if head else data)

    def flush(self) -> None:
        if self._head:
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
