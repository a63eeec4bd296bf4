"""An API server whose answers are given in advance, without a network."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import urllib3
from kubernetes.client import Configuration

from extender.kube.client import KubeApi


class CannedApi(KubeApi):
    """Each request is answered with the next body; without one, the connection fails."""

    def __init__(self, *bodies: Iterable[bytes]) -> None:
        super().__init__(Configuration())
        #: Each in the pieces in which it arrives.
        self.bodies = list(bodies)
        pool: Any = SimpleNamespace(request=self._answer)
        self._pool = pool

    def _answer(self, *_: object, **__: object) -> urllib3.HTTPResponse:
        if not self.bodies:
            raise ConnectionError("no further answer")
        body: Any = _Body(self.bodies.pop(0))
        return urllib3.HTTPResponse(body, status=200, preload_content=False)


class _Body:
    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces, self._rest = filter(None, pieces), b""

    def read(self, size: int) -> bytes:
        piece = self._rest or next(self._pieces, b"")
        self._rest = piece[size:]
        return piece[:size]

    read1 = read

    def close(self) -> None:
        """Nothing is open."""
