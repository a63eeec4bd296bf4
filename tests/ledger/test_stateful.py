"""Checks random sequences of operations on an in-memory store for overcommitment and leaked
reservations.

Binds run one after another, but each of their calls can be lost or can conflict with another change
of the pod. The components are connected as in the extender: the state, which follows the store's
watch, the judge, the controllers, and the ledger. The state machine decides when watch events
arrive. Until then, the state is older than the store.
"""

import itertools
from collections.abc import Callable

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from extender.ledger.bind_call import BindRequest, Bound
from extender.ledger.embedded_store import EmbeddedStore
from extender.reconcile.queue import Orphan, orphans, uninitialised
from headroom.contract.annotations import VRAM
from headroom.contract.gpunode import GPUNodeStatus
from headroom.contract.kube import (
    Container,
    Node,
    NodeStatus,
    ObjectMeta,
    Pod,
    PodSpec,
    PodStatus,
    ResourceRequirements,
)
from headroom.contract.watched import NodeSeen
from headroom.core.cluster.changes import Event
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.policy import Rules
from headroom.errors import OutcomeUnknown
from tests.blocking import ledger_over
from tests.builders import shared
from tests.examples import examples
from tests.judge import excess

RESOURCE = "nvidia.com/gpu"
MEMORY_BYTES = 10
ORPHAN_AFTER_S = 60.0
names_of_nodes = st.sampled_from(["n1", "n2"])
names_of_pods = st.sampled_from(["p1", "p2", "p3"])
calls = st.sampled_from(["read_gpunode", "read_pod", "write_spec", "bind", "touch_pod"])


def report(name: str, number: int) -> GPUNodeStatus:
    device = shared(f"GPU-{name}", free=8, memory_bytes=MEMORY_BYTES, resource=RESOURCE)
    return GPUNodeStatus(
        observed_at="1970-01-01T00:00:00Z", devices=[device], agent_version=str(number)
    )


class Cluster(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.wall_s = 0.0
        self.numbers = itertools.count(1)
        self.untold: list[Event] = []
        #: An operation, "before" or "after", and the fault that occurs once at this point.
        self.fault: tuple[str, str, str] | None = None
        #: The pod that is being bound, and its node.
        self.being_bound = ("p1", "n1")
        self.store = EmbeddedStore(self.untold.extend, lambda: 0.0, self.on_the_way)
        self.state = ClusterWriter(Rules(), stale_after_s=90.0, epoch_s=0.0)
        self.ledger, self.rival = (
            ledger_over(self.state, self.store, lambda: 0.0, wall_s=lambda: self.wall_s, ids=ids)
            for ids in ("id", "rival")
        )

    def on_the_way(self, operation: str, when: str) -> None:
        if self.fault is None or self.fault[:2] != (operation, when):
            return
        (_, _, what), self.fault = self.fault, None
        name, node = self.being_bound
        if what == "lost":
            raise OutcomeUnknown(f"{operation} {when}")
        if what == "removed":
            self.any_reservation_is_checked(node, name)
        elif what == "changed":
            self.user_creates_or_changes_a_pod(name, 8)
        elif what == "deleted":
            self.user_deletes_a_pod(name)
        elif (pod := self.pods().get(name)) is not None:
            rivals = {"bound here": node, "bound elsewhere": "n1" if node == "n2" else "n2"}
            self.rival.bind(BindRequest("a", name, pod.metadata.uid, rivals[what], pod, None))

    def unhurt(self, work: Callable[[], object]) -> None:
        """Run ``work`` without the fault, because the fault affects only the ledger."""
        fault, self.fault = self.fault, None
        work()
        self.fault = fault

    def pods(self) -> dict[str, Pod]:
        fault, self.fault = self.fault, None
        pods = {pod.metadata.name: pod for pod in self.store.list_pods()}
        self.fault = fault
        return pods

    @initialize()
    def initialise_nodes(self) -> None:
        for name in ("n1", "n2"):
            status = NodeStatus(allocatable={RESOURCE: 8})
            self.state.apply([NodeSeen(Node(metadata=ObjectMeta(name=name), status=status))])
        for _ in range(2):
            self.watch_catches_up()
            self.chores()
            for name in ("n1", "n2"):
                self.store.report([(name, report(name, 0))])
        self.watch_catches_up()
        self.chores()
        self.watch_catches_up()
        assert not uninitialised(self.state.cluster)

    @rule(name=names_of_pods, asked=st.integers(1, 8))
    def user_creates_or_changes_a_pod(self, name: str, asked: int) -> None:
        held = self.pods().get(name)
        if held is not None and held.node:
            return
        number = next(self.numbers)
        container = Container(name="main", resources=ResourceRequirements(limits={RESOURCE: 1}))
        metadata = ObjectMeta(
            namespace="a",
            name=name,
            uid=held.metadata.uid if held else f"uid-{number}",
            resource_version=f"u{number}",
            annotations={VRAM: str(asked)},
        )
        pod = Pod(metadata=metadata, spec=PodSpec(containers=[container]))
        self.unhurt(lambda: self.store.admit(pod))

    @rule(name=names_of_pods, node=names_of_nodes, fresh=st.booleans())
    def kube_scheduler_binds(self, name: str, node: str, fresh: bool) -> None:
        if name not in self.pods():
            self.user_creates_or_changes_a_pod(name, 6)
        pod = self.pods()[name]
        self.being_bound = name, node
        # This replica's copy of the pod may be old or missing.
        held = pod if fresh else self.state.cluster.pod(pod.metadata.uid)
        ask = BindRequest("a", name, pod.metadata.uid, node, held, self.state.cluster.gpunode(node))
        outcome = self.ledger.bind(ask)
        self.fault = None
        after = self.pods().get(name)
        assert outcome != Bound() or after is None or after.node == node

    @rule(name=names_of_pods)
    def user_deletes_a_pod(self, name: str) -> None:
        if name in self.pods():
            self.unhurt(lambda: self.store.delete_pod("a", name))

    @rule(name=names_of_pods)
    def a_pod_ends(self, name: str) -> None:
        pod = self.pods().get(name)
        if pod is not None and pod.node:
            ended = msgspec.structs.replace(pod, status=PodStatus(phase="Succeeded"))
            # Replace the pod directly, because the store accepts no newer version of a bound pod.
            self.unhurt(lambda: (self.store.delete_pod("a", name), self.store.admit(ended)))

    @rule(name=names_of_nodes)
    def agent_reports(self, name: str) -> None:
        self.unhurt(lambda: self.store.report([(name, report(name, next(self.numbers)))]))

    @rule(
        operation=calls,
        when=st.sampled_from(["before", "after"]),
        what=st.sampled_from(
            ["lost", "removed", "changed", "deleted", "bound here", "bound elsewhere"]
        ),
        name=names_of_pods,
        node=names_of_nodes,
        fresh=st.booleans(),
    )
    def a_bind_runs_with_a_fault(
        self, operation: str, when: str, what: str, name: str, node: str, fresh: bool
    ) -> None:
        self.fault = operation, when, what
        self.kube_scheduler_binds(name, node, fresh)

    @rule(operation=calls, when=st.sampled_from(["before", "after"]))
    def the_next_reconciliation_has_a_fault(self, operation: str, when: str) -> None:
        self.fault = operation, when, "lost"

    @rule(many=st.integers(1, 5))
    @precondition(lambda self: bool(self.untold))
    def watch_delivers_some_events(self, many: int) -> None:
        shown, self.untold[:] = self.untold[:many], self.untold[many:]
        self.state.apply(shown)

    @rule()
    def watch_catches_up(self) -> None:
        self.watch_delivers_some_events(len(self.untold))

    @rule(seconds=st.sampled_from([1.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.wall_s += seconds

    @rule()
    def chores(self) -> None:
        for found in orphans(self.state.cluster, self.wall_s, ORPHAN_AFTER_S):
            # Every finding is an orphan, because this replica receives all pods, and pods end
            # before they are deleted.
            assert isinstance(found, Orphan)
            self.ledger.remove(found.node, found.uid, found.left)
        if waiting := uninitialised(self.state.cluster):
            self.ledger.initialise(waiting)

    @rule(node=names_of_nodes, name=names_of_pods)
    def any_reservation_is_checked(self, node: str, name: str) -> None:
        if (pod := self.pods().get(name)) is not None:
            self.ledger.remove(node, pod.metadata.uid)

    @invariant()
    def nothing_is_overcommitted(self) -> None:
        sitting = [pod for pod in self.pods().values() if pod.node and not pod.ended]
        asked = ((pod.node, int(pod.annotation(VRAM) or 0)) for pod in sitting)
        assert excess(asked, {"n1": MEMORY_BYTES, "n2": MEMORY_BYTES}) == {}

    @invariant()
    def every_bound_pod_has_a_sufficient_reservation(self) -> None:
        for pod in self.pods().values():
            if pod.node and not pod.ended:
                gpunode = self.promises_on(pod.node)
                reserved = gpunode[pod.metadata.uid]
                assert reserved >= int(pod.annotation(VRAM) or 0)

    def promises_on(self, node: str) -> dict[str, int]:
        fault, self.fault = self.fault, None
        gpunode = self.store.read_gpunode(node)
        self.fault = fault
        reservations = gpunode.spec.reservations if gpunode else {}
        return {
            uid: sum(sum(charge.candidates.values()) for charge in reservation.charges)
            for uid, reservation in reservations.items()
        }

    def teardown(self) -> None:
        """Deliver all events and reconcile. Check that no reservation is leaked."""
        self.fault = None
        for _ in range(2):
            self.wall_s += ORPHAN_AFTER_S + 1
            self.watch_catches_up()
            self.chores()
        pods = self.pods().values()
        for node in ("n1", "n2"):
            sitting = {p.metadata.uid for p in pods if p.node == node and not p.ended}
            assert self.promises_on(node).keys() == sitting


Cluster.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None
)
TestCluster = Cluster.TestCase
