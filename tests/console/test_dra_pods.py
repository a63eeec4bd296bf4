"""Tests views of pods if kube-scheduler serves extended resources with DRA."""

from typing import Any

import msgspec
import pytest

from headroom.contract.kube import Pod
from headroom.contract.watched import GPUNodeSeen, PodSeen
from headroom.core.cluster.memory_totals import totals
from tests.builders import DISTRIBUTED, GIB, GPU, gpunode, pod, shared, use
from tests.console.asking import Asked
from tests.state.dra import claim, claiming, class_of, node, slice_of


def scheduled(of: Pod) -> Pod:
    return msgspec.structs.replace(
        of, spec=msgspec.structs.replace(of.spec, scheduler_name="default-scheduler")
    )


@pytest.fixture
def asked() -> Asked:
    """A cluster with a full node that has a device plugin, and a node whose two GPUs are allocated
    to one pod by DRA.
    """
    asked = Asked()
    full = gpunode(shared("GPU-full", 0, 1), name="full", plugin=DISTRIBUTED)
    devices = [shared("GPU-0", 0, resource="", used_bytes=5 * GIB), shared("GPU-1", 0, resource="")]
    rows = [use("uid-whole", "GPU-0", 5 * GIB, namespace="default", name="whole")]
    asked.writer.apply(
        [
            node("full", {GPU: "1"}),
            GPUNodeSeen(full, 0.0),
            node(),
            slice_of(),
            class_of(),
            GPUNodeSeen(gpunode(*devices, pods=rows), 0.0),
            claim("uid-whole"),
            PodSeen(claiming(pod(None, node="n", uid="uid-whole", name="whole"))),
            PodSeen(scheduled(pod(None, uid="uid-next", name="next"))),
            PodSeen(scheduled(pod("8Gi", uid="uid-sized", name="sized"))),
        ]
    )
    return asked


def explained(asked: Asked, name: str) -> dict[str, Any]:
    answer: dict[str, Any] = asked.get(f"/v1/explain?pod=default/{name}").json()
    return answer


def test_a_pod_served_by_dra_is_bound_without_a_reservation(asked: Asked) -> None:
    found = explained(asked, "whole")
    assert found["message"] == "bound to node n; ResourceClaim p-extended holds its devices"
    (row,) = asked.get("/v1/pods?state=dra").json()["pods"]
    assert (row["name"], row["reserved_bytes"], row["used_bytes"]) == ("whole", 0, 5 * GIB)
    assert asked.get("/v1/pods?state=unreserved").json()["pods"] == []
    # The pods must not fire the alert about unreserved pods.
    assert totals(asked.cluster.snapshot()).unreserved == 0


def test_a_pod_without_a_memory_request_fits_on_a_node_with_dra(asked: Asked) -> None:
    found = explained(asked, "next")
    assert (found["verdict"], found["fits"]) == ("fits", 1)
    assert "free devices of DRA" in found["not_checked"]
    (nearest, _) = found["nearest"]
    assert (nearest["node"], nearest["reason"]) == ("n", None)
    headline = (
        "n: fits if kube-scheduler finds a free device, because DRA allocates GPUs of the node"
    )
    assert (nearest["lines"], nearest["score_ratio"]) == ([headline], None)
    live = asked.get("/v1/score?pod=default/next&node=n").json()["live"]
    assert (live["node"]["fits"], live["terms"], live["failing"]) == (True, [], [])
    assert "free devices of DRA" in live["not_checked"]


def test_a_pod_with_a_memory_request_gets_a_suggestion(asked: Asked) -> None:
    found = explained(asked, "sized")
    assert {each["reason"]: each["nodes"] for each in found["reasons"]} == {
        "dra_manages": 1,
        "no_replica": 1,
    }


def test_capacity_counts_only_pods_that_headroom_can_place(asked: Asked) -> None:
    """Capacity ignores the other node, because only kube-scheduler can count the pods that DRA
    could serve.
    """
    found = asked.get("/v1/capacity").json()
    assert (found["pods"], found["space"]["fitting_nodes"]) == (0, 0)
    assert {each["reason"] for each in found["reasons"]} == {"dra_manages", "no_replica"}
    placed = asked.post("/v1/whatif", {"pods": [{"count": 2}]}).json()
    assert placed["placed"] == 0, placed
