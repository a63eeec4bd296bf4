"""Connections that send a request in one piece: each write is a record of TLS, and wakes up whoever
reads, who could do nothing with the head of a request alone."""

from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection


class _OnePiece(HTTPConnection):
    _held: list[bytes] | None = None

    def request(self, *args: Any, **how: Any) -> None:
        self._held = []
        try:
            super().request(*args, **how)
            whole = b"".join(self._held)
        finally:
            self._held = None
        self.send(whole)

    def send(self, data: Any) -> None:
        if self._held is None:
            super().send(data)
        else:
            self._held.append(data)


class _Plain(urllib3.HTTPConnectionPool):
    ConnectionCls = _OnePiece


class _OverTls(_OnePiece, HTTPSConnection):
    pass


class _Secure(urllib3.HTTPSConnectionPool):
    ConnectionCls = _OverTls


def in_one_piece(manager: urllib3.PoolManager) -> urllib3.PoolManager:
    """The same, with such connections from now on; for requests whose body is bytes."""
    manager.pool_classes_by_scheme = {"http": _Plain, "https": _Secure}
    return manager
