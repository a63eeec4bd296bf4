"""A watch line without an end is not buffered without limit."""

from collections.abc import Sequence
from typing import Any

from extender.kube.client import KubeApi
from extender.kube.reflector import Reflector
from extender.kube.resources import watched_kinds
from extender.state.changes import Event

MOST_LINE_BYTES = 8 << 20

CHUNK = b"x" * (1 << 20)


class Endless(KubeApi):
    """An API with an empty list, whose watch sends a line without an end."""

    def __init__(self) -> None:
        self.chunks = 0

    def call(self, method: str, path: str, **_: Any) -> bytes:
        return b'{"metadata":{"resourceVersion":"1"},"items":[]}'

    def stream(self, path: str, **_: Any) -> Any:
        return self

    def read(self) -> bytes:
        self.chunks += 1
        return CHUNK if self.chunks < 100 else b""

    def interrupt(self) -> None:
        return

    def close(self) -> None:
        return


def test_a_line_over_the_limit_is_an_error_and_causes_a_list() -> None:
    api, events = Endless(), list[Event]()

    def deliver(some: Sequence[Event]) -> None:
        events.extend(some)

    def wait(_: float) -> None:
        follower.stop()

    (kind,) = (each for each in watched_kinds("ns") if each.name == "nodes")
    follower = Reflector(kind, api, deliver, wait=wait)
    follower.run()
    assert api.chunks <= MOST_LINE_BYTES // len(CHUNK) + 1
    assert follower.health.reconnects == 1
    assert len(events) == 1  # the list
