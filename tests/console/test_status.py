"""Tests /v1/status, which shows readiness, settings, watches and the extenders."""

from typing import Any

from headroom.console.feed.journals import Followed
from headroom.core.journal.journal import Journal
from headroom.runtime.follow.journal_stream import StateLine
from tests.console.asking import WALL_S, Asked

FLEET = "nodes: [{name: a, gpus: 1, memory: 24Gi, sharing: time-slicing, replicas: 4}]"


def status(asked: Asked) -> Any:
    return asked.get("/v1/status").json()


def test_status_lists_peers() -> None:
    asked = Asked()
    state = StateLine("other", "1.2.3", WALL_S, 7, "Headroom only observes", "observe")
    asked.followed = [
        Followed("10.0.0.8:8889", Journal(), state, 0.25, ""),
        Followed("10.0.0.9:8889", Journal(), None, None, "connection refused"),
    ]
    body = status(asked)
    assert body["peers"] == [
        {
            "replica": "other",
            "version": "1.2.3",
            "ready": False,
            "not_ready_because": "Headroom only observes",
            "snapshot_generation": 7,
            "mode": "observe",
            "contact_age_s": 0.25,
        }
    ]
    assert body["unanswered"] == [{"peer": "10.0.0.9:8889", "message": "connection refused"}]
