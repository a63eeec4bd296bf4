"""Checks that reconciliation has the same result on any replica, and if it runs twice, late or
never.
"""

from collections.abc import Callable

import pytest

from extender.ledger.bind_call import Bound
from extender.reconcile.queue import Orphan, Unmarked, UnreservedPod
from headroom.contract.annotations import PLACEMENT
from tests.builders import GIB, use
from tests.ledger.lives import ORPHAN_AFTER_S, Cluster


def an_ended_pod(cluster: Cluster) -> None:
    cluster.create("p")
    cluster.bind("p")
    cluster.ends("p")


def an_orphan(cluster: Cluster) -> None:
    """Leave an old reservation of a pod that was never bound."""
    cluster.create("p")
    bind_without_its_binding(cluster)
    cluster.clock.passed_s += ORPHAN_AFTER_S + 1
    cluster.report()


def bind_without_its_binding(cluster: Cluster) -> None:
    """Crash during a bind, after the reservation and before the Binding."""

    class Crash(Exception):
        pass

    def crash(binding: object) -> None:
        raise Crash

    bind, cluster.server.bind = cluster.server.bind, crash  # type: ignore[method-assign]
    with pytest.raises(Crash):
        cluster.bind("p")
    cluster.server.bind = bind  # type: ignore[method-assign]
    assert cluster.reserved == {"p"}


def a_pod_bound_by_another_scheduler(cluster: Cluster) -> None:
    cluster.create("p", node="n")


def a_pod_deleted_by_force(cluster: Cluster) -> None:
    cluster.create("p")
    cluster.bind("p")
    cluster.server.lose_pod("p")


def a_pod_proven_to_be_gone(cluster: Cluster) -> None:
    a_pod_deleted_by_force(cluster)
    for i in range(2):
        cluster.done_by(i, cluster.found_by(i))  # Each replica marks it.
    cluster.report()
    cluster.report()


def a_terminating_gpunode(cluster: Cluster) -> None:
    cluster.create("p")
    cluster.bind("p")
    cluster.remove_node()


def a_recreated_gpunode(cluster: Cluster) -> None:
    a_terminating_gpunode(cluster)
    cluster.tidy()
    cluster.add_node()


def an_uninitialised_gpunode(cluster: Cluster) -> None:
    a_recreated_gpunode(cluster)
    cluster.done_by(0, cluster.found_by(0))
    cluster.report()


SCENES: dict[str, tuple[Callable[[Cluster], None], type]] = {
    "removal of an ended pod": (an_ended_pod, Orphan),
    "removal of an orphan": (an_orphan, Orphan),
    "adoption": (a_pod_bound_by_another_scheduler, UnreservedPod),
    "marking": (a_pod_deleted_by_force, Unmarked),
    "removal of a pod that is gone": (a_pod_proven_to_be_gone, Orphan),
    "removal of the finalizer": (a_terminating_gpunode, str),
    "creation": (a_recreated_gpunode, object),
    "initialisation": (an_uninitialised_gpunode, object),
}


@pytest.mark.parametrize("scene", SCENES)
def test_two_replicas_have_the_same_result_as_one(scene: str) -> None:
    make, kind = SCENES[scene]
    alone, both, again = Cluster(), Cluster(), Cluster()
    for cluster in (alone, both, again):
        make(cluster)
    tasks = [both.found_by(i) for i in range(2)]
    assert tasks[0] == tasks[1] != []
    assert all(isinstance(task, kind) for task in tasks[0])

    alone.done_by(0, alone.found_by(0))
    for i in range(2):
        both.done_by(
            i, tasks[i]
        )  # The second replica's findings are from before the first replica acted.
    assert list(both.content()) == list(alone.content())
    for _ in range(2):
        again.done_by(1, tasks[1])
    assert list(again.content()) == list(alone.content())
    # The next bind finds a consistent state, in which reservations, bound pods and free memory
    # agree.
    for cluster in (alone, both):
        cluster.tidy()
        cluster.tidy()
    assert list(both.content()) == list(alone.content())


@pytest.mark.parametrize("scene", SCENES)
def test_work_of_a_crashed_replica_is_done_by_the_other_replica(scene: str) -> None:
    make, _ = SCENES[scene]
    alone, with_idler = Cluster(replicas=1), Cluster()
    for cluster in (alone, with_idler):
        make(cluster) if scene != "removal of a pod that is gone" else a_pod_deleted_by_force(
            cluster
        )
        for _ in range(3):
            last = len(cluster.replicas) - 1
            cluster.done_by(last, cluster.found_by(last))
            if cluster.server.read_gpunode("n") is not None:
                cluster.report()
    assert list(with_idler.content()) == list(alone.content())


def bound_meanwhile(cluster: Cluster) -> None:
    assert cluster.bind("p", by=1) == Bound()


def deleted_meanwhile(cluster: Cluster) -> None:
    cluster.server.delete_pod("default", "p")


def replaced_meanwhile(cluster: Cluster) -> None:
    deleted_meanwhile(cluster)
    cluster.create("p", "4Gi", uid="heir", node="n")
    cluster.tidy()


def seen_after_all(cluster: Cluster) -> None:
    """Report that the pod runs, after its end was proven."""
    cluster.report(pods=[use("p", "a", GIB)])


@pytest.mark.parametrize(
    ("scene", "meanwhile", "reserved"),
    [
        ("removal of an orphan", bound_meanwhile, {"p"}),
        ("removal of an orphan", deleted_meanwhile, {"p"}),
        ("removal of an ended pod", replaced_meanwhile, {"heir"}),
        ("adoption", deleted_meanwhile, set()),
        ("adoption", replaced_meanwhile, {"heir"}),
        ("removal of a pod that is gone", seen_after_all, {"p"}),
    ],
)
def test_delayed_work_checks_the_state_again(
    scene: str, meanwhile: Callable[[Cluster], None], reserved: set[str]
) -> None:
    """Replica a finds the work, is paused, and continues after the state has changed in the
    meantime.
    """
    cluster = Cluster()
    SCENES[scene][0](cluster)
    found = cluster.found_by(0)
    cluster.replicas[0].paused = []
    meanwhile(cluster)
    cluster.done_by(0, found)
    assert cluster.reserved == reserved
    cluster.replicas[0].resume()


def test_a_pod_bound_by_us_is_not_adopted() -> None:
    """The pod's reservation is in the store before its Binding."""
    cluster = Cluster()
    cluster.replicas[1].paused = []
    cluster.create("p")
    cluster.bind("p")
    bound = cluster.server.read_pod("default", "p")
    assert bound is not None
    assert bound.annotation(PLACEMENT)
    # This replica has received the pod but not its reservation.
    assert cluster.replicas[1].ledger.charge("n", bound)
    assert cluster.node.spec.reservations["p"].flags == []
