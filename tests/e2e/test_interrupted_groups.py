"""Checks that a group is bound completely if another group competes or its extender is killed."""

import pytest

from tests.controlplane import SCHEDULER_NAME
from tests.e2e.cluster import PlayedCluster
from tests.e2e.conftest import ONE_GPU, NewCluster
from tests.e2e.test_gangs import bound, create_gang, scheduled, scheduled_by

# Kubernetes 1.35 has another API for groups.
pytestmark = pytest.mark.since("1.36")


def reserved(cluster: PlayedCluster) -> int:
    """Return the number of reservations."""
    return sum(len(each.spec.reservations) for each in cluster.gpunodes())


def test_a_group_is_bound_completely_after_its_extender_was_killed(new_cluster: NewCluster) -> None:
    """When the extender is killed, four pods have reservations, but no pod is bound. The pods are
    bound with these reservations, which the next extender would otherwise remove after an hour.
    """
    cluster = new_cluster(6, ONE_GPU)
    with scheduled(cluster) as calls:

        def dies() -> None:
            cluster.until(lambda: reserved(cluster) == 4, "four pods have reserved memory")
            cluster.kill("extender")
            calls.rejected = {f"killed-{i}" for i in range(12)}

        calls.after_binds, calls.before_bind = 4, dies
        create_gang(cluster, "killed", ["12Gi"] * 12)
        cluster.until(lambda: calls.count["rejected bind"] == 8, "the other binds have failed")
        assert bound(cluster, "killed") == 0
        cluster.start_extender(settings={"orphan_after_s": 3600.0})
        calls.rejected.clear()
        cluster.until(lambda: bound(cluster, "killed") == 12, "the group is bound whole")
        assert reserved(cluster) == 12


def test_one_of_two_groups_that_need_the_same_memory_is_bound_completely(
    new_cluster: NewCluster,
) -> None:
    """Each group has its own scheduler and its own extender. The extenders wait long for binds,
    because a busy machine is slow.
    """
    cluster = new_cluster(3, ONE_GPU)
    ports = cluster.start_replicas("first", "second", settings={"bind_deadline_s": 60})
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with (
        scheduled_by(cluster, SCHEDULER_NAME, urls[0]),
        scheduled_by(cluster, "other", urls[1]),
    ):
        cluster.settle()
        create_gang(cluster, "left", ["12Gi"] * 6)
        create_gang(cluster, "right", ["12Gi"] * 6, scheduler="other")

        def counts() -> list[int]:
            return sorted([bound(cluster, "left"), bound(cluster, "right")])

        try:
            cluster.until(lambda: counts() == [0, 6], "one group is bound whole")
        except AssertionError as err:
            names = [r.name for each in cluster.gpunodes() for r in each.spec.reservations.values()]
            raise AssertionError(f"bound: {counts()}, reserved: {sorted(names)}") from err
        winner, loser = ("left", "right") if bound(cluster, "left") else ("right", "left")
        for index in range(6):
            cluster.delete_pod(f"{winner}-{index}")
        cluster.nodes.observe(cluster.pods())
        cluster.until(lambda: bound(cluster, loser) == 6, "the other group is bound whole")
