"""Checks that a pod deleted by force keeps its reservation while it runs, even with late, lost or
wrong data.

The agent's status writer, the cluster state, the controllers and the ledger are real. The machine
below simulates the node, the API server, the network, the watches and every clock. It has the true
state of the pod's container, and checks it when they decide that the pod has left.
"""

import random
from collections.abc import Callable
from datetime import UTC, datetime
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from structlog.testing import capture_logs

from agent.status_writer import StatusWriter
from extender.ledger.embedded_store import SyncStore
from extender.reconcile.queue import Orphan, orphans
from headroom.contract.gpunode import GPUNodeStatus, Source
from headroom.contract.kube import Pod
from headroom.contract.watched import PodGone, PodSeen, Relisted
from headroom.core.cluster.changes import DepartureMarked
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.policy import Rules
from tests.blocking import Ledger
from tests.builders import pod, shared, use
from tests.examples import examples
from tests.state.played import Api


class Departing(RuleBasedStateMachine):
    """The pod is bound, starts, is deleted by force and ends, in this order, at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.api = Api()
        self.state = ClusterWriter(Rules(), stale_after_s=90.0, epoch_s=0.0)
        self.ledger = Ledger(
            cast(SyncStore, self.api),
            judge=lambda pod, gpunode: None,  # type: ignore[arg-type,return-value]
            adopt=lambda pod, gpunode: None,
            written=lambda gpunode: None,
            wall_s=lambda: 0.0,
            new_id=lambda: "id",
        )
        self.runs = self.ended = self.let_go = False
        self.monotonic_s = 1000.0
        self.wall_s = 1_795_219_200.0
        self.new_agent()

    @rule()
    def new_agent(self) -> None:
        #: A sample that was taken but not delivered yet, and the time of its start.
        self.sample: tuple[GPUNodeStatus, float] | None = None
        self.courier = StatusWriter(
            self.api,
            30.0,
            lambda: self.monotonic_s,
            lambda: datetime.fromtimestamp(self.wall_s, UTC),
            random.Random(1),
        )

    @precondition(lambda self: self.api.pod is not None)
    @rule()
    def pod_starts(self) -> None:
        self.runs = True
        self.api.pod = pod(node="n", phase="Running")
        self.api.untold["pods"].append(PodSeen(self.api.pod))

    @precondition(lambda self: self.api.pod is not None)
    @rule()
    def pod_is_deleted_by_force(self) -> None:
        self.api.pod, self.ended = None, True
        self.api.untold["pods"].append(PodGone("uid-p"))

    @precondition(lambda self: self.ended)
    @rule()
    def pod_ends(self) -> None:
        self.runs = False

    @rule(after_s=st.sampled_from([0.1, 31.0]))
    def agent_samples(self, after_s: float) -> None:
        self.time_passes(after_s)
        observed_at = datetime.fromtimestamp(self.wall_s, UTC).isoformat()
        self.sample = (
            GPUNodeStatus(
                observed_at=observed_at,
                devices=[shared("a")],
                pods=[use("uid-p", "a")] if self.runs else [],
                sources=[Source(name="podresources"), Source(name="proc")],
            ),
            self.monotonic_s,
        )

    @precondition(lambda self: self.sample is not None)
    @rule(silent=st.booleans(), slow_s=st.sampled_from([0.0, 31.0]))
    def agent_delivers(self, silent: bool, slow_s: float) -> None:
        assert self.sample is not None
        self.api.silent = silent
        self.monotonic_s += slow_s
        with capture_logs():
            self.courier.deliver(*self.sample)

    @rule()
    def agent_runs_for_a_while(self) -> None:
        """Send two heartbeats of new samples."""
        self.api.silent = False
        for _ in range(2):
            self.agent_samples(31.0)
            self.agent_delivers(False, 0.0)

    @precondition(lambda self: self.api.lingering)
    @rule()
    def a_write_arrives_late(self) -> None:
        self.api.lingering.pop(0)()

    def time_passes(self, seconds: float) -> None:
        self.monotonic_s += seconds
        self.wall_s += seconds

    @rule(seconds=st.sampled_from([-600.0, -1.0, 600.0]))
    def clock_of_the_node_jumps(self, seconds: float) -> None:
        self.wall_s += seconds

    @rule(kind=st.sampled_from(["gpunodes", "leases", "pods"]), many=st.sampled_from([1, 9]))
    def watch_tells(self, kind: str, many: int) -> None:
        untold = self.api.untold[kind]
        self.state.apply(untold[:many])
        del untold[:many]

    @rule()
    def extender_catches_up(self) -> None:
        for kind in self.api.untold:
            self.watch_tells(kind, len(self.api.untold[kind]))
        self.chores()

    @rule()
    def pods_are_listed_again(self) -> None:
        self.api.untold["pods"].clear()
        pods = (self.api.pod,) if self.api.pod is not None else ()
        self.state.apply([Relisted(Pod, pods, 0.0)])

    @rule()
    def chores(self) -> None:
        for found in orphans(self.state.cluster, 1000.0, 60.0):
            if isinstance(found, Orphan) and not found.left:
                # It will be touched, if it is still unbound.
                assert self.state.cluster.pod("uid-p") == pod()
            elif isinstance(found, Orphan):
                assert not self.runs, "it still runs"
                assert self.ended, "it is still to come"
                self.let_go = True
            else:
                version = self.ledger.departed_by(found.node, found.uid, found.reservation)
                if version:
                    self.state.apply([DepartureMarked(found.node, found.uid, version)])

    def teardown(self) -> None:
        """Assert that the reservation is finally removed."""
        if not self.ended:
            return
        self.pod_ends()
        self.api.lingering.clear()
        for _ in range(3):
            self.agent_runs_for_a_while()
            self.extender_catches_up()
        assert self.let_go


Departing.TestCase.settings = settings(
    max_examples=examples(200), stateful_step_count=25, deadline=None
)
TestDeparting = Departing.TestCase

STORIES: dict[str, Callable[[Departing], object]] = {
    "a sample from before the pod came is delivered after it was deleted": lambda m: (
        m.agent_runs_for_a_while(),
        m.extender_catches_up(),
        m.agent_samples(31.0),
        m.pod_starts(),
        m.pod_is_deleted_by_force(),
        m.extender_catches_up(),
        m.agent_delivers(False, 0.0),
        m.extender_catches_up(),
    ),
    "such a sample is delivered again and again": lambda m: (
        m.agent_runs_for_a_while(),
        m.extender_catches_up(),
        m.agent_samples(31.0),
        m.pod_starts(),
        m.pod_is_deleted_by_force(),
        m.extender_catches_up(),
        m.agent_delivers(False, 0.0),
        m.agent_delivers(False, 31.0),
        m.agent_delivers(False, 31.0),
        m.extender_catches_up(),
    ),
    "heartbeats from before the pod came arrive after it was deleted": lambda m: (
        m.agent_runs_for_a_while(),
        m.extender_catches_up(),
        m.agent_runs_for_a_while(),
        m.agent_runs_for_a_while(),
        m.pod_starts(),
        m.pod_is_deleted_by_force(),
        m.watch_tells("pods", 9),
        m.chores(),
        m.extender_catches_up(),
    ),
    "it was bound and deleted without a watch": lambda m: (
        m.agent_runs_for_a_while(),
        m.extender_catches_up(),
        m.pod_starts(),
        m.pod_is_deleted_by_force(),
        m.pods_are_listed_again(),
        m.chores(),
    ),
    "the watch of pods is behind when its absence is noted": lambda m: (
        m.agent_runs_for_a_while(),
        m.watch_tells("gpunodes", 9),
        m.watch_tells("leases", 9),
        m.chores(),
        m.agent_runs_for_a_while(),
        m.watch_tells("leases", 9),
        m.pod_starts(),
        m.chores(),
    ),
    "a heartbeat speaks of a report that is not here yet": lambda m: (
        m.agent_runs_for_a_while(),
        m.pod_starts(),
        m.agent_runs_for_a_while(),
        m.pod_is_deleted_by_force(),
        m.watch_tells("pods", 9),
        m.watch_tells("leases", 9),
        m.watch_tells("gpunodes", 1),
        m.chores(),
        m.agent_runs_for_a_while(),
        m.agent_runs_for_a_while(),
        m.watch_tells("leases", 9),
        m.chores(),
    ),
    "a late report overwrites a newer one": lambda m: (
        m.agent_samples(31.0),
        m.agent_delivers(True, 0.0),
        m.pod_starts(),
        m.agent_runs_for_a_while(),
        m.a_write_arrives_late(),
        m.pod_is_deleted_by_force(),
        m.extender_catches_up(),
        m.agent_runs_for_a_while(),
        m.extender_catches_up(),
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_a_force_deleted_pod_that_still_runs_keeps_its_reservation(story: str) -> None:
    machine = Departing()
    STORIES[story](machine)
    assert machine.runs
    machine.pod_is_deleted_by_force()
    machine.teardown()
