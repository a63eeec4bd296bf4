"""Checks that requeued pods claim nodes until they are bound or rejected, so that only as many are
requeued as fit.
"""

import msgspec

from headroom.contract.annotations import RETRY, STARTUP
from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason
from headroom.contract.watched import PodGone
from tests.builders import NOW_S, pod
from tests.state.requeues import AT_ONCE, CLAIM_S, MAX_BACK_OFF_S, MOST_WEIGHED, Requeues, rejected


def test_as_many_pods_as_fit_are_requeued_in_order_of_priority() -> None:
    world = Requeues("n", "m")
    young, old = rejected("young", minute=2), rejected("old", minute=1)
    first = rejected("important", minute=3, priority=1)
    world.see(young, old, first)
    world.requeued()
    world.holds("n", 0)
    assert world.requeued() == ["important"]
    world.holds("m", 0)
    assert world.requeued() == ["old"]


def test_several_small_pods_are_requeued_for_the_freed_memory() -> None:
    world = Requeues("n")
    world.see(*(rejected(f"p{i}", "8Gi", minute=i) for i in range(5)))
    world.requeued()
    world.holds("n", 6)
    assert world.requeued() == ["p0", "p1"]


def test_a_bound_pod_frees_the_rest_of_its_claim() -> None:
    world = Requeues("n")
    world.see(*(rejected(f"p{i}", "8Gi", minute=i) for i in range(3)))
    world.holds("n", 15)
    assert world.requeued() == ["p0"]
    world.see(pod("8Gi", uid="p0", name="p0", node="n"))
    world.holds("n", 1)
    assert world.requeued() == ["p1"]


def test_a_pod_that_is_rejected_again_leaves_the_memory_to_the_next() -> None:
    world = Requeues("n")
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
    """Filter is never called for these pods, so their claims end only by time."""
    world = Requeues("n")
    world.see(*(rejected(f"stuck{i}", minute=i) for i in range(3)), rejected("right", minute=9))
    world.holds("n", 0)
    found = [world.requeued(CLAIM_S) for _ in range(4)]
    assert found == [["stuck0"], ["stuck1"], ["stuck2"], ["right"]]


def test_a_thousand_pods_for_other_nodes_do_not_delay_the_pod_that_fits() -> None:
    world = Requeues("n", labels={"zone": "a"})

    def selecting(uid: str, zone: str, minute: int) -> Pod:
        made = rejected(uid, minute=minute)
        spec = msgspec.structs.replace(made.spec, node_selector={"zone": zone})
        return msgspec.structs.replace(made, spec=spec)

    world.see(*(selecting(f"b{i}", "b", 0) for i in range(1000)), selecting("right", "a", 1))
    world.holds("n", 0)
    assert world.requeued() == ["right"]


def test_many_pods_are_requeued_in_batches() -> None:
    names = [f"n{i}" for i in range(AT_ONCE + 5)]
    world = Requeues(*names)
    world.see(*(rejected(f"p{i:02}", minute=i % 60) for i in range(len(names))))
    for name in names:
        world.holds(name, 0)
    assert len(world.requeued()) == AT_ONCE
    assert world.hints.pending
    assert len(world.requeued()) == 5


def test_memory_is_not_claimed_again_if_another_replica_requeued_a_pod_for_it() -> None:
    world = Requeues("n")
    first, second = rejected("first", minute=1), rejected("second", minute=2)
    world.see(first, second)
    world.requeued()
    world.holds("n", 0)
    annotated = {**(first.metadata.annotations or {}), RETRY: "of another"}
    metadata = msgspec.structs.replace(first.metadata, annotations=annotated)
    world.see(msgspec.structs.replace(first, metadata=metadata))
    assert world.requeued() == []
    # After a while it is claimed again, because the pod was requeued for another reason or the
    # other replica ended.
    assert world.requeued(CLAIM_S) == ["first"]


def test_a_pod_that_could_not_be_requeued_is_tried_again() -> None:
    world = Requeues("n")
    world.see(rejected("p"))
    world.holds("n", 0)
    assert world.requeued() == ["p"]
    world.hints.missed("p")
    assert world.requeued(1.0) == ["p"]


def test_a_pod_that_is_requeued_without_effect_is_requeued_with_growing_intervals() -> None:
    world = Requeues("n")
    world.see(rejected("p"))
    at_s: list[float] = []
    while world.now_s < NOW_S + 60:
        world.holds("n", 24)
        world.holds("n", 0)
        at_s += [world.now_s for _ in world.requeued(0.5)]
    assert 5 <= len(at_s) <= 20
    assert at_s[-1] - at_s[-2] >= MAX_BACK_OFF_S - CLAIM_S


def test_an_interrupted_pass_has_the_same_result() -> None:
    names = [f"n{i}" for i in range(6)]
    whole, parts = Requeues(*names), Requeues(*names)
    for world in (whole, parts):
        world.see(*(rejected(f"p{i}", f"{8 + i % 3}Gi", minute=i) for i in range(20)))
        world.requeued()
        for name in names:
            world.holds(name, 4)
    found: list[str] = []
    steps = 0
    for named in parts.hints.due(parts.state.cluster, parts.journal, parts.now_s, parts.wall_s()):
        steps += 1
        if named is not None:
            found.append(named.metadata.uid)
        # Events that arrive meanwhile count in the next check.
        parts.see(rejected(f"late{steps}", minute=59))
    assert steps > 20
    assert found == whole.requeued(0.0)
    assert len(found) > len(names)


def test_a_pass_checks_a_limited_number_of_claimed_nodes_and_the_next_continues() -> None:
    many = MOST_WEIGHED + 20
    world = Requeues("n")
    # Each pod has a different request, so that no result for one pod can be reused for the next.
    world.see(rejected("first", "10Gi", minute=1))
    world.see(*(rejected(f"p{i:03}", f"{15_000 + i}Mi", minute=2) for i in range(many)))
    world.see(rejected("last", "10Gi", minute=3))
    world.requeued()
    world.holds("n", 0)
    assert world.requeued() == ["first"]
    assert world.hints.pending
    assert world.requeued() == ["last"]


def test_memory_that_victims_freed_for_a_pod_requeues_no_other_pod() -> None:
    world = Requeues("n")
    nominee = rejected("nominee", "10Gi", minute=9, priority=5)
    status = msgspec.structs.replace(nominee.status, nominated_node_name="n")
    world.see(msgspec.structs.replace(nominee, status=status), rejected("older", priority=5))
    assert world.requeued() == []
    world.holds("n", 12)
    assert world.requeued() == ["nominee"]
    # The other pod would fit, because the nominated pod is not bound yet.
    world.holds("n", 3)
    assert world.requeued(CLAIM_S + 1.0) == ["nominee"]
    # A pod with a higher priority does not wait for other pods.
    world.see(rejected("above", priority=6))
    world.holds("n", 2)
    assert world.requeued(MAX_BACK_OFF_S) == ["above"]


def test_a_pod_rejected_for_a_held_node_is_requeued_when_the_hold_ends() -> None:
    world = Requeues("n")
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
    """Two pods wait until the start on the only GPU has ended, although there is memory for
    both.
    """
    said = f"0/1 nodes are available: 1 {Reason.OTHER_STARTING.sentence}. preemption: none."
    world = Requeues("n")
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
    assert world.requeued(CLAIM_S / 2) == []  # It may be bound, and start alone.
    assert world.requeued(CLAIM_S) == ["second"]  # The first pod was not bound.


def test_a_pod_that_is_tried_after_its_claim_is_requeued_for_the_next_gain() -> None:
    """kube-scheduler may try a requeued pod only after its back-off, of at most 10 s. A claim is
    shorter, so that the memory is not left free for a pod that is not tried."""
    world = Requeues("n")
    first, second = rejected("first", minute=1), rejected("second", minute=2)
    world.see(first, second)
    world.holds("n", 0)
    assert world.requeued() == ["first"]
    assert world.requeued(CLAIM_S - 0.1) == []
    assert world.requeued(0.1) == ["second"]
    world.see(pod("20Gi", uid="second", name="second", node="n"))
    world.holds("n", 24)
    world.now_s += MAX_BACK_OFF_S
    world.decides(first, fits=0)
    assert world.requeued() == []
    world.see(pod("20Gi", uid="second", name="second", node="n", phase="Succeeded"))
    world.holds("n", 0)
    assert world.requeued() == ["first"]
