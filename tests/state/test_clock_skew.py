"""Checks that with wrong clocks, the report of a live agent stays fresh, and the report of a dead
agent becomes stale in time.
"""

import random
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from structlog.testing import capture_logs

from agent.status_writer import StatusWriter
from headroom.contract.gpunode import GPUNodeStatus
from headroom.contract.reasons import Reason
from headroom.contract.watched import NodeSeen
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.fit import fit
from headroom.core.placement.policy import Rules
from tests.builders import kube_node, request, shared
from tests.state.played import Api

#: 2026-11-21T00:00:00Z, when the receiver's monotonic clock shows 0.
WALL_S = 1_795_219_200.0
STALE_AFTER_S = 90.0
INTERVAL_S = 5.0

#: Offset of the node's clock, by true seconds since the start.
Skew = Callable[[float], float]


class Play:
    """A node that does not change, its agent, and an extender that watches both."""

    def __init__(self, skew: Skew) -> None:
        self.skew = skew
        self.at_s = 0.0
        self.api = Api()
        self.state = ClusterWriter(Rules(), STALE_AFTER_S, WALL_S)
        self.state.apply([NodeSeen(kube_node())])
        self.courier = StatusWriter(
            self.api, 30.0, lambda: self.at_s + 777.0, self.node_clock, random.Random(1)
        )

    def node_clock(self) -> datetime:
        return datetime.fromtimestamp(WALL_S + self.at_s + self.skew(self.at_s), UTC)

    def cycle(self) -> None:
        status = GPUNodeStatus(observed_at=self.node_clock().isoformat(), devices=[shared("a")])
        self.api.at_s = self.at_s
        with capture_logs():
            self.courier.deliver(status, self.at_s + 777.0)
        self.hear()
        self.at_s += INTERVAL_S

    def hear(self) -> None:
        for kind in ("gpunodes", "leases"):
            self.state.apply(self.api.untold[kind])
            self.api.untold[kind].clear()

    @property
    def reason(self) -> Reason | None:
        snap = self.state.cluster.snapshot()
        return fit(request("1Gi"), snap, snap.rows(["n"]), self.at_s).reason(0)


@pytest.mark.parametrize(
    ("skew", "fresh_after_s"),
    [
        pytest.param(lambda at_s: 0.0, 0.0, id="right"),
        pytest.param(lambda at_s: 600.0, 30.0, id="ten minutes ahead"),
        pytest.param(lambda at_s: -600.0, 30.0, id="ten minutes behind"),
        pytest.param(
            lambda at_s: 600.0 if at_s % 120 < 60 else -600.0, 30.0, id="jumps back and forth"
        ),
        pytest.param(lambda at_s: -0.99999 * at_s, 0.0, id="nearly stopped"),
        pytest.param(lambda at_s: -3 * at_s, 0.0, id="runs backwards"),
    ],
)
def test_a_wrong_clock_of_the_node_has_no_effect(skew: Skew, fresh_after_s: float) -> None:
    play = Play(skew)
    while play.at_s < 3600.0:
        play.cycle()
        # The first timestamp of a wrong clock proves nothing, but the second timestamp does.
        assert (play.reason is None) == (play.at_s > fresh_after_s), play.at_s
    silent_since_s = play.at_s
    while play.at_s < silent_since_s + STALE_AFTER_S + 30.0:
        play.at_s += 1.0
        if play.reason is not None:
            break
    assert play.reason is Reason.STALE_REPORT
    assert STALE_AFTER_S - 30.0 - INTERVAL_S <= play.at_s - silent_since_s <= STALE_AFTER_S


def test_a_starting_extender_accepts_a_steady_nodes_report_by_its_heartbeat() -> None:
    """The report may be a day old."""
    play = Play(lambda at_s: 0.0)
    while play.at_s < 3600.0:
        play.cycle()
    fresh = ClusterWriter(Rules(), STALE_AFTER_S, WALL_S)
    fresh.apply([NodeSeen(kube_node())])
    play.state, play.api.at_s = fresh, play.at_s
    assert play.api.gpunode.status is not None
    play.state.apply(play.api.everything())
    assert play.reason is None
    play.at_s += STALE_AFTER_S
    assert play.reason is Reason.STALE_REPORT
