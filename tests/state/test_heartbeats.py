"""Checks that the receiver's own clock decides whether a timestamp changed recently."""

import pytest

from headroom.contract.timestamps import age
from headroom.core.cluster.trackers.heartbeats import Heartbeat

NEVER_S = float("-inf")

#: 2026-11-21T00:00:00Z, when the receiver's monotonic clock shows 1000.
WALL_S = 1_795_219_200.0
EPOCH_S = WALL_S - 1000.0


def pulse(*beats: tuple[str, float]) -> float:
    p = Heartbeat()
    for stamp, at_s in beats:
        p.beat(stamp, at_s, EPOCH_S, recent_s=90.0)
    return p.moved_at_s


@pytest.mark.parametrize(
    ("stamp", "moved_at_s"),
    [
        pytest.param("2026-11-21T00:00:00Z", 1000.0, id="a current report"),
        pytest.param("2026-11-20T23:59:00Z", 940.0, id="a minute old"),
        pytest.param("2026-11-20T23:58:29Z", NEVER_S, id="too old"),
        pytest.param("2026-11-21T00:01:00Z", 1000.0, id="a clock that is a little ahead"),
        pytest.param("2026-11-21T00:01:31Z", NEVER_S, id="a clock that is far ahead"),
        pytest.param("2026-11-21T01:00:00+01:00", 1000.0, id="another zone"),
        pytest.param("yesterday", NEVER_S, id="not a time"),
        pytest.param("", NEVER_S, id="empty"),
    ],
)
def test_the_first_timestamp_counts_only_if_it_is_recent(stamp: str, moved_at_s: float) -> None:
    assert pulse((stamp, 1000.0)) == moved_at_s


def test_a_changed_timestamp_counts_whatever_its_value() -> None:
    """Because the value does not count, a wrong clock on the node has no effect."""
    assert pulse(("1999-01-01T00:00:00Z", 1000.0), ("1999-01-01T00:00:10Z", 1010.0)) == 1010.0


def test_a_repeated_timestamp_is_not_a_heartbeat() -> None:
    stamp = "2026-11-21T00:00:00Z"
    assert pulse((stamp, 1000.0), (stamp, 1080.0)) == 1000.0
    assert pulse((stamp, 1000.0), ("", 1080.0)) == 1000.0


def test_the_age_of_a_timestamp_is_computed() -> None:
    assert age("2026-11-20T23:59:59.500Z", WALL_S) == 0.5
    assert age("2026-11-21T00:00:01", WALL_S) == -1.0
    assert age("soon", WALL_S) is None
