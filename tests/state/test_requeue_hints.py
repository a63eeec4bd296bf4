"""Checks that pods that fit after a gain of headroom are requeued once, in their order, and that no
pod is forgotten.
"""

import msgspec

from extender.requeue.hints import rejected_by_us
from headroom.contract.annotations import DEFAULT_VRAM, MAX_SM
from headroom.contract.kube import Namespace, ObjectMeta, Pod
from headroom.contract.watched import NamespaceSeen, NodeSeen, PodGone, PodSeen
from tests.builders import kube_node, pod
from tests.state.requeues import CLAIM_S, MAX_BACK_OFF_S, SAID, Requeues, rejected, saying


def test_no_pod_is_requeued_while_no_memory_is_freed() -> None:
    world = Requeues("n")
    world.see(rejected("p"))
    assert world.requeued() == []
    assert not world.hints.pending


def test_a_pod_is_requeued_after_its_device_is_uncordoned() -> None:
    world = Requeues("n")
    world.holds("n", 0)
    cordoned = kube_node("n", {"headroom.gpu/cordon": "n"})
    world.state.apply([NodeSeen(cordoned)])
    world.see(rejected("p"))
    assert world.requeued(CLAIM_S) == []
    world.state.apply([NodeSeen(kube_node("n"))])
    assert world.requeued() == ["p"]


def test_a_pod_that_fits_is_requeued_once_for_each_gain() -> None:
    world = Requeues("n")
    world.see(rejected("p"), rejected("large", "25Gi"))
    world.requeued()
    world.holds("n", 0)
    assert world.requeued() == ["p"]
    assert [world.requeued(CLAIM_S) for _ in range(3)] == [[], [], []]
    assert not world.hints.pending
    world.holds("n", 24)
    world.holds("n", 0)
    assert world.requeued(MAX_BACK_OFF_S) == ["p"]


def test_a_starting_replica_requeues_rejected_pods_that_fit() -> None:
    world = Requeues("n")
    world.holds("n", 0)
    world.see(
        rejected("p"), rejected("cpu", message="0/1 nodes are available: 1 Insufficient cpu.")
    )
    assert world.requeued() == ["p"]


def test_a_rejection_in_the_journal_counts_without_a_condition() -> None:
    world = Requeues("n")
    waiting = pod("20Gi", uid="p")
    world.see(waiting)
    world.decides(waiting, fits=0)
    world.holds("n", 0)
    assert world.requeued() == ["p"]


def test_a_pod_that_passed_filter_is_not_requeued() -> None:
    world = Requeues("n")
    waiting = rejected("p")
    world.see(waiting)
    world.holds("n", 0)
    world.decides(waiting, fits=1)
    assert world.requeued() == []
    # The pod was not bound although it fits, and no other client would requeue it.
    assert world.requeued(after_s=10) == ["p"]


def test_a_pod_rejected_for_assumed_binds_that_failed_is_tried_again() -> None:
    world = Requeues("n")
    waiting = rejected("p")
    world.see(waiting)
    world.holds("n", 0)
    assert world.requeued() == ["p"]
    world.now_s += 0.1
    world.decides(waiting, fits=0, sure=False)
    assert world.requeued(0.5) == ["p"]


def test_a_clock_that_is_set_back_delays_no_pod() -> None:
    world = Requeues("n")
    waiting = rejected("p")
    world.see(waiting)
    world.holds("n", 0)
    world.epoch_s += 3000.0
    assert world.requeued() == ["p"]
    world.epoch_s -= 3000.0
    assert world.requeued() == []
    world.now_s += 0.1
    world.decides(waiting, fits=0, sure=False)
    assert world.requeued(0.5) == ["p"]


def test_a_pod_rejected_with_all_memory_known_is_not_retried() -> None:
    world = Requeues("n")
    waiting = rejected("p")
    world.see(waiting)
    world.holds("n", 0)
    world.decides(waiting, fits=0)
    assert world.requeued() == []


def test_a_node_with_a_new_heartbeat_counts_as_a_gain() -> None:
    world = Requeues("n")
    world.holds("n", 0)
    world.now_s += 200
    world.see(rejected("p"))
    assert world.requeued() == []
    world.holds("n", 0)
    assert world.requeued() == ["p"]


def wanting_calm(uid: str, limit: str = "50%", minute: int = 0) -> Pod:
    made = rejected(uid, "1Gi", minute=minute)
    annotations = {**(made.metadata.annotations or {}), MAX_SM: limit}
    metadata = msgspec.structs.replace(made.metadata, annotations=annotations)
    return msgspec.structs.replace(made, metadata=metadata)


def test_a_pod_that_waits_for_idle_sms_is_requeued_when_they_are_idle_enough() -> None:
    world = Requeues("n")
    world.holds("n", 0, sm=0.9)
    world.see(wanting_calm("p"))
    assert world.requeued() == []
    for busy in (0.95, 0.7, 0.5):
        world.holds("n", 0, sm=busy)
        assert world.requeued() == []
    world.holds("n", 0, sm=0.4)
    assert world.requeued() == ["p"]


def test_a_pod_is_requeued_when_sm_activity_becomes_known() -> None:
    world = Requeues("n")
    world.holds("n", 0)
    world.see(wanting_calm("p"))
    assert world.requeued() == []
    world.holds("n", 0, sm=0.1)
    assert world.requeued() == ["p"]


def test_lower_sm_activity_requeues_no_pod_that_did_not_request_it() -> None:
    world = Requeues("n", "m")
    world.holds("n", 4, sm=0.9)
    world.see(rejected("p"))
    waiting = world.state.cluster.pod("p")
    assert waiting is not None
    world.requeued()
    world.decides(waiting, fits=0)
    world.now_s += MAX_BACK_OFF_S
    latest = world.state.cluster.latest_gain
    world.holds("n", 4, sm=0.1)
    assert world.state.cluster.latest_gain == latest  # No pod is checked.
    assert world.requeued() == []
    world.holds("m", 23)  # Pods are checked, but not this pod.
    world.holds("n", 4, sm=0.05)
    assert world.requeued() == []
    latest = world.state.cluster.latest_gain
    world.holds("n", 4, sm=0.01)
    world.see(wanting_calm("q"))
    assert world.state.cluster.latest_gain > latest
    world.state.apply([PodGone("q")])
    assert world.state.cluster.latest_gain == latest


def test_a_pod_that_requests_less_is_checked_again() -> None:
    world = Requeues("n")
    world.see(rejected("p", "20Gi"))
    world.holds("n", 16)
    assert world.requeued() == []
    world.see(rejected("p", "4Gi"))
    world.holds("n", 15)
    assert world.requeued() == ["p"]


def test_a_pod_whose_namespace_default_decreases_is_checked_again() -> None:
    world = Requeues("n")
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


def test_a_deleted_or_bound_pod_is_dropped() -> None:
    world = Requeues("n")
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
