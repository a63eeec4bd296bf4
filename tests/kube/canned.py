"""An API server with predefined responses, without a network."""

from collections.abc import Iterable
from typing import Any

from headroom.runtime.kube.api_errors import NoAnswer
from headroom.runtime.kube.client import KubeApi


class CannedApi(KubeApi):
    """Answers each request with the next body. Without a further body, there is no response."""

    def __init__(self, *bodies: Iterable[bytes]) -> None:
        #: Bodies, each in the pieces in which it arrives.
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
        """Do nothing, because nothing is open."""

    interrupt = close
