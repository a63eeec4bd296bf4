"""Checks on a real API server that the bound pods of an incomplete group are evicted together."""

import pytest

from tests.e2e.cluster import EVENTS, PlayedCluster
from tests.e2e.conftest import ONE_GPU, NewCluster
from tests.e2e.test_gangs import bound, create_gang, create_member, scheduled

# Kubernetes 1.35 has another API for groups.
pytestmark = pytest.mark.since("1.36")
#: The minimum value of the setting.
AFTER_S = 10


def leaving(cluster: PlayedCluster, name: str) -> list[str]:
    """Return the pods of the group that are being deleted."""
    pods = [each["metadata"] for each in cluster.pods()]
    gone = [each["name"] for each in pods if "deletionTimestamp" in each]
    return sorted(each for each in gone if each.startswith(f"{name}-"))


def messages(cluster: PlayedCluster) -> dict[str, str]:
    """Return the message of the Event about an evicted group for each pod."""
    return {
        each["involvedObject"]["name"]: each["message"]
        for each in cluster.plane.call("GET", EVENTS)["items"]
        if each["reason"] == "EvictedWithGroup"
    }


def test_the_bound_part_of_a_group_is_evicted_and_the_group_is_bound_completely(
    new_cluster: NewCluster,
) -> None:
    """The bind of one pod fails repeatedly. A group that has its minimum of bound pods is not
    evicted.
    """
    cluster = new_cluster(3, ONE_GPU)
    with scheduled(cluster, evict_partial_groups_after_s=AFTER_S) as calls:
        calls.rejected = {"short-3", "enough-1"}
        create_gang(cluster, "enough", ["4Gi"] * 2, 1)
        cluster.until(lambda: bound(cluster, "enough") == 1, "a group has its minimum")
        create_gang(cluster, "short", ["12Gi"] * 4)
        cluster.until(lambda: bound(cluster, "short") == 3, "a part of a group is bound")
        evicted = [f"short-{i}" for i in range(3)]
        cluster.until(lambda: leaving(cluster, "short") == evicted, "that part is evicted")
        cluster.until(lambda: sorted(messages(cluster)) == evicted, "each has its Event")
        reason = "Only 3 of the 4 pods that group short needs are bound"
        assert reason in messages(cluster)["short-0"]
        assert leaving(cluster, "enough") == []
        # End the pods as the kubelets would, and create them again as their controller would.
        for name in evicted:
            cluster.delete_pod(name)
        cluster.nodes.observe(cluster.pods())
        calls.rejected.clear()
        for index in range(4, 7):
            create_member(cluster, "short", index, "12Gi")
        cluster.until(lambda: bound(cluster, "short") == 4, "the group is bound whole")
