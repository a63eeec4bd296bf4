"""Checks that a watch line without an end is not buffered without limit."""

from collections.abc import Sequence

from headroom.core.cluster.changes import Event
from headroom.runtime.kube.reflector import Reflector
from headroom.runtime.kube.resources import watched_kinds
from tests.kube.canned import CannedApi

MOST_LINE_BYTES = 8 << 20

EMPTY = b'{"metadata":{"resourceVersion":"1"},"items":[]}'
CHUNK = b"x" * (1 << 20)


def test_a_line_over_the_limit_is_an_error_and_causes_a_list() -> None:
    endless, events = iter([CHUNK] * 100), list[Event]()

    def deliver(some: Sequence[Event]) -> None:
        events.extend(some)

    def wait(_: float) -> None:
        follower.stop()

    (kind,) = (each for each in watched_kinds("ns") if each.name == "nodes")
    follower = Reflector(kind, CannedApi([EMPTY], endless), deliver, wait=wait)
    follower.run()
    assert 100 - len(list(endless)) <= MOST_LINE_BYTES // len(CHUNK) + 1
    assert follower.health.reconnects == 1
    assert len(events) == 1  # the list
