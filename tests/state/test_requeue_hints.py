"""Which pods are requeued: those that fit after a gain, once, in their order; none is lost."""

from typing import Literal

import msgspec

from contract.annotations import DEFAULT_VRAM, MAX_SM, RETRY, STARTUP
from contract.gpunode import SmActivity
from contract.kube import Namespace, ObjectMeta, Pod, PodCondition, PodStatus
from contract.reasons import Reason
from extender.placement.policy import Rules
from extender.state.changes import GPUNodeSeen, NamespaceSeen, NodeSeen, PodGone, PodSeen
from extender.state.cluster_writer import ClusterWriter
from extender.state.journal import Decision, Journal
from extender.state.requeue_hints import RequeueHints, rejected_by_us
from tests.builders import GIB, NOW_S, STAMP, gpunode, kube_node, pod, reservation, shared

AT_ONCE = 64
CLAIM_S = 2.0
MAX_BACK_OFF_S = 10.0
MOST_WEIGHED = 256

WALL_S = 1_795_219_200.0  # 2026-11-21T00:00:00Z
SAID = f"0/2 nodes are available: 2 {Reason.MEMORY_ON_ANY.sentence}. preemption: none."


def rejected(
    uid: str, vram: str = "20Gi", *, message: str = SAID, minute: int = 0, priority: int = 0
) -> Pod:
    """As kube-scheduler leaves a pod that no node takes."""
    created = f"2026-11-20T10:{minute:02}:00Z"
    made = pod(vram, uid=uid, name=uid, created=created, priority=priority)
    return saying(made, "PodScheduled", "False", "Unschedulable", message)


def saying(waiting: Pod, kind: str, status: str, reason: str, message: str) -> Pod:
    condition = PodCondition(type=kind, status=status, reason=reason, message=message)
    status_of = PodStatus(phase="Pending", conditions=[condition])
    return msgspec.structs.replace(waiting, status=status_of)


class World:
    """One replica that looks on while nodes of one shared 24 GiB GPU fill and empty."""

    def __init__(self, *nodes: str, labels: dict[str, str] | None = None) -> None:
        self.state = ClusterWriter(Rules(), 90.0, WALL_S - NOW_S)
        self.waking, self.journal = RequeueHints(), Journal()
        self.now_s, self.version = NOW_S, 0
        #: How wrong its wall clock is.
        self.ahead_s = 0.0
        for name in nodes:
            metadata = ObjectMeta(name=name, labels=labels)
            self.state.apply(
                [NodeSeen(msgspec.structs.replace(kube_node(name), metadata=metadata))]
            )
            self.holds(name, 24)

    def holds(self, name: str, gib: int, replicas: int = 4, sm: float | None = None) -> None:
        """Its agent reports this unattributed use, number of free replicas and SM activity."""
        self.version += 1
        sm_activity = None if sm is None else SmActivity(sm, "gpm")
        gpu = shared(
            name,
            free=replicas,
            used_bytes=gib * GIB,
            unattributed_bytes=gib * GIB,
            sm_activity=sm_activity,
        )
        stamp = STAMP.replace("00:00:00", f"00:00:{self.version % 60:02}")
        node = gpunode(gpu, name=name, version=str(self.version), observed_at=stamp)
        self.state.apply([GPUNodeSeen(node, self.now_s)])

    def starts(self, phase: Literal["starting", "running"]) -> None:
        """The ledger of node n has one pod that starts alone, in this phase."""
        self.version += 1
        held = msgspec.structs.replace(
            reservation({"n": 4 * GIB}), phase=phase, start_timeout_s=600
        )
        node = gpunode(shared("n"), reservations={"s": held}, version=str(self.version))
        self.state.apply([GPUNodeSeen(node, self.now_s)])

    def see(self, *pods: Pod) -> None:
        self.state.apply(map(PodSeen, pods))

    def decides(self, who: Pod, fits: int, sure: bool = True) -> None:
        """This replica's filter was asked."""
        generation = self.state.snapshot().generation
        self.journal.record(
            Decision(who, "d", self.wall_s, generation, 1, fits, {}, sure),
        )

    @property
    def wall_s(self) -> float:
        return WALL_S + self.now_s - NOW_S + self.ahead_s

    def requeued(self, after_s: float = 0.01) -> list[str]:
        """Those named now."""
        self.now_s += after_s
        steps = self.waking.due(self.state, self.journal, self.now_s, self.wall_s)
        due = [who for who in steps if who is not None]
        for who in due:
            self.waking.requeued(who.metadata.uid, f"{who.metadata.uid}@{self.now_s}")
        return [who.metadata.uid for who in due]


def test_no_pod_is_requeued_while_no_memory_is_freed() -> None:
    world = World("n")
    world.see(rejected("p"))
    assert world.requeued() == []
    assert not world.waking.pending


def test_a_pod_is_requeued_after_its_device_is_uncordoned() -> None:
    world = World("n")
    world.holds("n", 0)
    cordoned = kube_node("n", {"headroom.gpu/cordon": "n"})
    world.state.apply([NodeSeen(cordoned)])
    world.see(rejected("p"))
    assert world.requeued(CLAIM_S) == []
    world.state.apply([NodeSeen(kube_node("n"))])
    assert world.requeued() == ["p"]


def test_a_pod_that_fits_is_requeued_once_for_each_gain() -> None:
    world = World("n")
    world.see(rejected("p"), rejected("large", "25Gi"))
    world.requeued()
    world.holds("n", 0)
    assert world.requeued() == ["p"]
    assert [world.requeued(CLAIM_S) for _ in range(3)] == [[], [], []]
    assert not world.waking.pending
    world.holds("n", 24)
    world.holds("n", 0)
    assert world.requeued(MAX_BACK_OFF_S) == ["p"]


def test_as_many_as_fit_the_most_urgent_first() -> None:
    world = World("n", "m")
    young, old = rejected("young", minute=2), rejected("old", minute=1)
    first = rejected("important", minute=3, priority=1)
    world.see(young, old, first)
    world.requeued()
    world.holds("n", 0)
    assert world.requeued() == ["important"]
    world.holds("m", 0)
    assert world.requeued() == ["old"]


def test_small_ones_share_what_came_free() -> None:
    world = World("n")
    world.see(*(rejected(f"p{i}", "8Gi", minute=i) for i in range(5)))
    world.requeued()
    world.holds("n", 6)
    assert world.requeued() == ["p0", "p1"]


def test_a_bound_pod_frees_the_rest_of_its_claim() -> None:
    world = World("n")
    world.see(*(rejected(f"p{i}", "8Gi", minute=i) for i in range(3)))
    world.holds("n", 15)
    assert world.requeued() == ["p0"]
    world.see(pod("8Gi", uid="p0", name="p0", node="n"))
    world.holds("n", 1)
    assert world.requeued() == ["p1"]


def test_a_pod_that_is_rejected_again_leaves_the_memory_to_the_next() -> None:
    world = World("n")
    stuck, next_one = rejected("stuck", minute=1), rejected("next", minute=2)
    world.see(stuck, next_one)
    world.requeued()
    world.holds("n", 0)
    assert world.requeued() == ["stuck"]
    assert world.requeued() == []
    world.now_s += 0.1
    world.decides(stuck, fits=0)
    assert world.requeued() == ["next"]


def test_a_pod_that_other_plugins_reject_does_not_block_the_others() -> None:
    """Filter is never called for them, so only time passes."""
    world = World("n")
    world.see(*(rejected(f"stuck{i}", minute=i) for i in range(3)), rejected("right", minute=9))
    world.holds("n", 0)
    found = [world.requeued(CLAIM_S) for _ in range(4)]
    assert found == [["stuck0"], ["stuck1"], ["stuck2"], ["right"]]


def test_a_thousand_pods_for_other_nodes_do_not_delay_the_pod_that_fits() -> None:
    world = World("n", labels={"zone": "a"})

    def selecting(uid: str, zone: str, minute: int) -> Pod:
        made = rejected(uid, minute=minute)
        spec = msgspec.structs.replace(made.spec, node_selector={"zone": zone})
        return msgspec.structs.replace(made, spec=spec)

    world.see(*(selecting(f"b{i}", "b", 0) for i in range(1000)), selecting("right", "a", 1))
    world.holds("n", 0)
    assert world.requeued() == ["right"]


def test_many_pods_are_requeued_in_portions() -> None:
    names = [f"n{i}" for i in range(AT_ONCE + 5)]
    world = World(*names)
    world.see(*(rejected(f"p{i:02}", minute=i % 60) for i in range(len(names))))
    for name in names:
        world.holds(name, 0)
    assert len(world.requeued()) == AT_ONCE
    assert world.waking.pending
    assert len(world.requeued()) == 5


def test_a_replica_that_starts_requeues_rejected_pods_that_fit() -> None:
    world = World("n")
    world.holds("n", 0)
    world.see(
        rejected("p"), rejected("cpu", message="0/1 nodes are available: 1 Insufficient cpu.")
    )
    assert world.requeued() == ["p"]


def test_what_the_journal_saw_needs_no_condition() -> None:
    world = World("n")
    waiting = pod("20Gi", uid="p")
    world.see(waiting)
    world.decides(waiting, fits=0)
    world.holds("n", 0)
    assert world.requeued() == ["p"]


def test_a_pod_that_passed_filter_is_not_requeued() -> None:
    world = World("n")
    waiting = rejected("p")
    world.see(waiting)
    world.holds("n", 0)
    world.decides(waiting, fits=1)
    assert world.requeued() == []
    # It was never bound: it fits, and no other client would requeue it.
    assert world.requeued(after_s=10) == ["p"]


def test_a_pod_rejected_for_assumed_binds_that_failed_is_tried_again() -> None:
    world = World("n")
    waiting = rejected("p")
    world.see(waiting)
    world.holds("n", 0)
    assert world.requeued() == ["p"]
    world.now_s += 0.1
    world.decides(waiting, fits=0, sure=False)
    assert world.requeued(0.5) == ["p"]


def test_a_clock_that_is_set_back_delays_no_pod() -> None:
    world = World("n")
    waiting = rejected("p")
    world.see(waiting)
    world.holds("n", 0)
    world.ahead_s = 3000.0
    assert world.requeued() == ["p"]
    world.ahead_s = 0.0
    assert world.requeued() == []
    world.now_s += 0.1
    world.decides(waiting, fits=0, sure=False)
    assert world.requeued(0.5) == ["p"]


def test_a_pod_rejected_with_all_memory_known_is_not_tried_again() -> None:
    world = World("n")
    waiting = rejected("p")
    world.see(waiting)
    world.holds("n", 0)
    world.decides(waiting, fits=0)
    assert world.requeued() == []


def test_a_node_with_a_new_heartbeat_counts_as_a_gain() -> None:
    world = World("n")
    world.holds("n", 0)
    world.now_s += 200
    world.see(rejected("p"))
    assert world.requeued() == []
    world.holds("n", 0)
    assert world.requeued() == ["p"]


def test_memory_for_a_pod_that_another_replica_requeued_is_left_to_it() -> None:
    world = World("n")
    first, second = rejected("first", minute=1), rejected("second", minute=2)
    world.see(first, second)
    world.requeued()
    world.holds("n", 0)
    annotated = {**(first.metadata.annotations or {}), RETRY: "of another"}
    metadata = msgspec.structs.replace(first.metadata, annotations=annotated)
    world.see(msgspec.structs.replace(first, metadata=metadata))
    assert world.requeued() == []
    # Unless that was for something else, or the other one died over it.
    assert world.requeued(CLAIM_S) == ["first"]


def test_a_pod_that_could_not_be_requeued_is_tried_again() -> None:
    world = World("n")
    world.see(rejected("p"))
    world.holds("n", 0)
    assert world.requeued() == ["p"]
    world.waking.missed("p")
    assert world.requeued(1.0) == ["p"]


def test_a_pod_that_is_requeued_in_vain_is_requeued_less_and_less_often() -> None:
    world = World("n")
    world.see(rejected("p"))
    at_s: list[float] = []
    while world.now_s < NOW_S + 60:
        world.holds("n", 24)
        world.holds("n", 0)
        at_s += [world.now_s for _ in world.requeued(0.5)]
    assert 5 <= len(at_s) <= 20
    assert at_s[-1] - at_s[-2] >= MAX_BACK_OFF_S - CLAIM_S


def wanting_calm(uid: str, limit: str = "50%", minute: int = 0) -> Pod:
    made = rejected(uid, "1Gi", minute=minute)
    annotations = {**(made.metadata.annotations or {}), MAX_SM: limit}
    metadata = msgspec.structs.replace(made.metadata, annotations=annotations)
    return msgspec.structs.replace(made, metadata=metadata)


def test_a_pod_that_waits_for_idle_sms_is_requeued_when_they_are_idle_enough() -> None:
    world = World("n")
    world.holds("n", 0, sm=0.9)
    world.see(wanting_calm("p"))
    assert world.requeued() == []
    for busy in (0.95, 0.7, 0.5):
        world.holds("n", 0, sm=busy)
        assert world.requeued() == []
    world.holds("n", 0, sm=0.4)
    assert world.requeued() == ["p"]


def test_sms_that_are_known_at_last_may_be_idle_enough() -> None:
    world = World("n")
    world.holds("n", 0)
    world.see(wanting_calm("p"))
    assert world.requeued() == []
    world.holds("n", 0, sm=0.1)
    assert world.requeued() == ["p"]


def test_lower_sm_activity_requeues_no_pod_that_did_not_request_it() -> None:
    world = World("n", "m")
    world.holds("n", 4, sm=0.9)
    world.see(rejected("p"))
    waiting = world.state.pod("p")
    assert waiting is not None
    world.requeued()
    world.decides(waiting, fits=0)
    world.now_s += MAX_BACK_OFF_S
    latest = world.state.latest_gain
    world.holds("n", 4, sm=0.1)
    assert world.state.latest_gain == latest  # not even a look
    assert world.requeued() == []
    world.holds("m", 23)  # there is a look, but not for this
    world.holds("n", 4, sm=0.05)
    assert world.requeued() == []
    latest = world.state.latest_gain
    world.holds("n", 4, sm=0.01)
    world.see(wanting_calm("q"))
    assert world.state.latest_gain > latest
    world.state.apply([PodGone("q")])
    assert world.state.latest_gain == latest


def test_a_pod_that_requests_less_is_checked_again() -> None:
    world = World("n")
    world.see(rejected("p", "20Gi"))
    world.holds("n", 16)
    assert world.requeued() == []
    world.see(rejected("p", "4Gi"))
    world.holds("n", 15)
    assert world.requeued() == ["p"]


def test_a_pod_whose_namespace_default_decreases_is_checked_again() -> None:
    world = World("n")
    bare = rejected("p")
    metadata = msgspec.structs.replace(bare.metadata, annotations={})
    bare = msgspec.structs.replace(bare, metadata=metadata)

    def default(vram: str) -> None:
        annotations = {DEFAULT_VRAM: vram}
        namespace = Namespace(metadata=ObjectMeta(name="default", annotations=annotations))
        world.state.apply([NamespaceSeen(namespace)])

    default("20Gi")
    world.see(bare)
    world.holds("n", 16)
    assert world.requeued() == []
    default("4Gi")
    world.holds("n", 15)
    assert world.requeued() == ["p"]


def test_a_pass_may_be_interrupted_between_any_two_pods_with_the_same_result() -> None:
    names = [f"n{i}" for i in range(6)]
    whole, parts = World(*names), World(*names)
    for world in (whole, parts):
        world.see(*(rejected(f"p{i}", f"{8 + i % 3}Gi", minute=i) for i in range(20)))
        world.requeued()
        for name in names:
            world.holds(name, 4)
    found: list[str] = []
    steps = 0
    for named in parts.waking.due(parts.state, parts.journal, parts.now_s, parts.wall_s):
        steps += 1
        if named is not None:
            found.append(named.metadata.uid)
        # What comes in between is news for the next look.
        parts.see(rejected(f"late{steps}", minute=59))
    assert steps > 20
    assert found == whole.requeued(0.0)
    assert len(found) > len(names)


def test_a_pass_checks_a_limited_number_of_claimed_nodes_and_the_next_continues() -> None:
    many = MOST_WEIGHED + 20
    world = World("n")
    # Each asks for something else, so that nothing learned of one is known of the next.
    world.see(rejected("first", "10Gi", minute=1))
    world.see(*(rejected(f"p{i:03}", f"{15_000 + i}Mi", minute=2) for i in range(many)))
    world.see(rejected("last", "10Gi", minute=3))
    world.requeued()
    world.holds("n", 0)
    assert world.requeued() == ["first"]
    assert world.waking.pending
    assert world.requeued() == ["last"]


def test_a_deleted_or_bound_pod_is_forgotten() -> None:
    world = World("n")
    world.see(rejected("gone"), rejected("bound"))
    world.state.apply([PodGone("gone"), PodSeen(pod("1Gi", uid="bound", node="m"))])
    world.holds("n", 0)
    assert world.requeued() == []


def test_only_a_rejection_with_our_reason_counts() -> None:
    def shown(kind: str, status: str, reason: str, message: str) -> bool:
        return rejected_by_us(saying(pod(), kind, status, reason, message))

    assert shown("PodScheduled", "False", "Unschedulable", SAID)
    assert not shown("PodScheduled", "True", "", SAID)
    assert not shown("Ready", "False", "Unschedulable", SAID)
    assert not shown("PodScheduled", "False", "SchedulerError", SAID)
    assert not shown("PodScheduled", "False", "Unschedulable", "no cpu")
    assert not rejected_by_us(pod())


def test_memory_that_victims_freed_for_a_pod_requeues_no_other_pod() -> None:
    world = World("n")
    nominee = rejected("nominee", "10Gi", minute=9, priority=5)
    status = msgspec.structs.replace(nominee.status, nominated_node_name="n")
    world.see(msgspec.structs.replace(nominee, status=status), rejected("older", priority=5))
    assert world.requeued() == []
    world.holds("n", 12)
    assert world.requeued() == ["nominee"]
    # There would be room for the other, and the nominee is not there yet.
    world.holds("n", 3)
    assert world.requeued(CLAIM_S + 1.0) == ["nominee"]
    # A pod with a higher priority yields to no pod.
    world.see(rejected("above", priority=6))
    world.holds("n", 2)
    assert world.requeued(MAX_BACK_OFF_S) == ["above"]


def test_a_pod_rejected_for_a_held_node_is_requeued_when_the_hold_ends() -> None:
    world = World("n")
    nominee = rejected("nominee", "10Gi", priority=5)
    status = msgspec.structs.replace(nominee.status, nominated_node_name="n")
    other = rejected("other", minute=1)
    world.see(msgspec.structs.replace(nominee, status=status))
    world.holds("n", 0)
    world.requeued()
    world.see(other)
    world.decides(other, fits=0, sure=False)
    assert world.requeued(CLAIM_S + 0.1) == []
    world.state.apply([PodGone("nominee")])
    assert world.requeued() == ["other"]


def test_pods_that_start_alone_are_requeued_one_after_the_other() -> None:
    """Two pods wait until the start on the only GPU has ended; there is memory for both."""
    said = f"0/1 nodes are available: 1 {Reason.OTHER_STARTING.sentence}. preemption: none."
    world = World("n")
    world.starts("running")
    world.starts("starting")
    for minute, uid in enumerate(("first", "second")):
        waits = rejected(uid, "4Gi", message=said, minute=minute)
        metadata = msgspec.structs.replace(
            waits.metadata, annotations={**(waits.metadata.annotations or {}), STARTUP: "alone"}
        )
        world.see(msgspec.structs.replace(waits, metadata=metadata))
    assert world.requeued(CLAIM_S) == []
    world.starts("running")
    assert world.requeued() == ["first"]
    assert world.requeued(CLAIM_S / 2) == []  # it may be bound, and start alone
    assert world.requeued(CLAIM_S) == ["second"]  # the first pod was not bound
