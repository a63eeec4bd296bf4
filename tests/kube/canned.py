"""An API server with predefined responses, without a network."""

from collections.abc import Iterable
from typing import Any

from headroom.runtime.kube.api_errors import NoAnswer
from headroom.runtime.kube.client import KubeApi


class CannedApi(KubeApi):
    """Answers each request with the next body. When no body is left, requests fail."""

    def __init__(self, *bodies: Iterable[bytes]) -> None:
        #: The remaining bodies. Each body arrives in these pieces.
        self.bodies = list(bodies)

    def call(self, method: str, path: str, **_: Any) -> bytes:
        return b"".join(self._next())

    def stream(self, path: str, **_: Any) -> Any:
        return _Body(self._next())

    def _next(self) -> Iterable[bytes]:
        if not self.bodies:
            raise NoAnswer("no further answer")
        return self.bodies.pop(0)


class _Body:
    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = filter(None, pieces)

    def read(self) -> bytes:
        return next(self._pieces, b"")

    def close(self) -> None:
        """Do nothing, because there is no connection."""

    interrupt = close
