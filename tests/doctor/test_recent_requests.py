"""Checks that the advised number of replicas follows recent pods, whose decisions a real console
lists.
"""

from typing import Any
from urllib.parse import urlencode

import pytest

from headroom.core.journal.decision_records import Asked as Requested
from headroom.core.journal.decision_records import Filtered
from headroom.doctor.recent_requests import RecentRequests, recent_requests
from headroom.doctor.sharing_rules import ContainerRequest
from tests.builders import GIB, GPU
from tests.console.asking import WALL_S, Asked
from tests.doctor.test_node_rules import asking, findings, sliced

HOUR_S = 3600.0


class Console:
    """A client for the console of ``asked``."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.calls = 0

    def get(self, *path: str, **query: str | int | bool | None) -> Any:
        self.calls += 1
        given = {key: value for key, value in query.items() if value is not None}
        return self.asked.get(f"/v1/{'/'.join(path)}?{urlencode(given)}").json()

    def decide(self, uid: str, amount: str, at_s: float, version: int = 1) -> None:
        source = "replica" if amount == "1 replica" else "annotation"
        request = (Requested("main", GPU, 1, amount, source),)
        part = Filtered(at_s, 400, 7, 5, 2, {}, request)
        self.asked.journal.records.note(f"{uid}.{version}", "default", uid, part, at_s)


@pytest.fixture
def console() -> Console:
    asked = Asked()
    asked.now_s = 8 * HOUR_S
    return Console(asked)


def requested(uid: str, count_bytes: int | None, is_annotated: bool = True) -> ContainerRequest:
    return ContainerRequest(uid, GPU, count_bytes, is_annotated)


def test_each_pod_of_the_last_hours_counts_once_with_its_newest_request(console: Console) -> None:
    console.decide("too-old", "4Gi", WALL_S + 1 * HOUR_S)
    console.decide("a", "8Gi", WALL_S + 3 * HOUR_S)
    console.decide("b", "25%", WALL_S + 4 * HOUR_S)
    console.decide("c", "1 replica", WALL_S + 5 * HOUR_S)
    console.decide("a", "6Gi", WALL_S + 6 * HOUR_S, version=2)
    found = recent_requests(console, page=2)
    assert found.requests == (
        requested("a", 6 * GIB),
        requested("c", None, is_annotated=False),
        requested("b", None),
    )
    assert (found.span_s, console.calls) == (5 * HOUR_S, 2)


def test_at_most_the_newest_5000_decisions_are_read(console: Console) -> None:
    for number in range(6):
        console.decide(f"u{number}", "8Gi", WALL_S + 7 * HOUR_S + number)
    found = recent_requests(console, most=4, page=2)
    assert [each.uid for each in found.requests] == ["u5", "u4", "u3", "u2"]


def test_advised_replicas_follow_recent_pods_and_not_only_existing_ones() -> None:
    """Two pods of 20 GiB run now, but in the last hours jobs of 4 GiB started and ended."""
    present = asking("20Gi", "20Gi")
    assert findings(sliced(2), pods=present) == []
    came = tuple(requested(f"job{number}", 4 * GIB) for number in range(6))
    # An existing pod counts only once.
    requests = (requested("u0", 20 * GIB), *came)
    recent = RecentRequests(requests, 5.24 * HOUR_S)
    (found,) = findings(sliced(2), pods=present, recent=recent)
    assert found.found == (
        "each nvidia.com/gpu device of 24Gi has 2 replicas, and at least a quarter of 8 GPU "
        "containers (from 8 pods that exist now or came in the last 5.2 h) request 4Gi or less: "
        "replicas run out before memory does"
    )
    assert found.do.startswith("set replicas: 6 ")
    (found,) = findings(sliced(2), pods=present, recent=RecentRequests(requests, 70.0))
    assert "(from 8 pods that exist now or came in the last 2 min)" in found.found
