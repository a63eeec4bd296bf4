"""Checks that /v1/capacity counts the pods that filter would place."""

from collections.abc import Sequence

import msgspec
import pytest

from headroom.console.views import capacity
from headroom.contract.kube import NodeSpec
from headroom.contract.watched import GPUNodeSeen, NodeSeen
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.fit import Verdicts
from headroom.core.whatif.node_whatif import pod_counts
from tests.builders import DISTRIBUTED, GIB, GPU, gpunode, kube_node, reservation, shared, use
from tests.console.asking import Asked


@pytest.fixture
def fleet() -> Asked:
    """A cluster of two nodes with two GPUs each. A GPU has 24 GiB and 4 replicas. 20 GiB of one GPU
    are reserved.
    """
    asked = Asked()
    held = gpunode(
        shared("A", free=3, allocated=1),
        shared("B"),
        name="held",
        reservations={"u": reservation({"A": 20 * GIB})},
        pods=[use("u", "A", replica="A::0")],
        plugin=DISTRIBUTED,
    )
    empty = gpunode(shared("C"), shared("D"), name="empty", plugin=DISTRIBUTED)
    for each in (held, empty):
        asked.writer.apply([NodeSeen(kube_node(each.name)), GPUNodeSeen(each, 0.0)])
    return asked


def test_the_count_is_not_free_memory_divided_by_the_size(fleet: Asked) -> None:
    body = fleet.get("/v1/capacity?vram=8Gi&by_node=true").json()
    # 8 GiB would fit nine times into the 76 free GiB. But after one pod on B, the plugin could
    # choose A next, which has too little memory.
    assert (body["pods"], body["pods_at_least"], body["fullness"]) == (7, False, "fits")
    assert [(node["name"], node["pods"], node["reason"]) for node in body["nodes"]] == [
        ("empty", 6, None),
        ("held", 1, None),
    ]
    assert body["message"].startswith("7 such pods fit now, on 2 of 2 nodes")
    assert body["space"]["largest_fitting_bytes"] == 24 * GIB
    assert body["request"] == {
        "container": "main",
        "resource": GPU,
        "count": 1,
        "amount": "8Gi",
        "source": "annotation",
        "limit": None,
    }


def test_a_count_is_kept_until_its_node_changes(
    fleet: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []

    def recorded(cluster: Cluster, verdicts: Verdicts, positions: Sequence[int]) -> object:
        counted.append([verdicts.snap.nodes[int(verdicts.rows[i])].name for i in positions])
        return pod_counts(cluster, verdicts, positions)

    monkeypatch.setattr(capacity, "pod_counts", recorded)

    def pods(vram: str) -> int:
        found: int = fleet.get(f"/v1/capacity?vram={vram}").json()["pods"]
        return found

    assert [pods("8Gi"), pods("8Gi"), pods("4Gi")] == [7, 7, pods("4Gi")]
    assert [len(each) for each in counted] == [2, 0, 2, 0]
    devices = shared("C"), shared("D", free=0, allocated=4)
    changed = gpunode(*devices, name="empty", version="2", plugin=DISTRIBUTED)
    fleet.writer.apply([GPUNodeSeen(changed, 0.0)])
    assert pods("8Gi") == 4
    assert counted[4:] == [["empty"]]


def test_uncounted_nodes_make_the_count_a_lower_bound(fleet: Asked) -> None:
    body = fleet.get("/v1/capacity?vram=8Gi&most_nodes=0&by_node=true").json()
    assert (body["pods"], body["pods_at_least"]) == (2, True)
    assert body["not_checked"] == ["CPU, memory and other resources", "ResourceQuotas"]
    assert body["message"].startswith("at least 2 such pods")
    assert [node["counted"] for node in body["nodes"]] == [False, False]


def test_without_a_size_a_pod_requests_the_share_of_a_replica(fleet: Asked) -> None:
    body = fleet.get("/v1/capacity").json()
    assert (body["request"]["amount"], body["space"]["need_bytes"]) == ("1 replica", 6 * GIB)
    assert (body["pods"], body["nodes"]) == (9, [])


def test_a_cordoned_node_takes_no_pods(fleet: Asked) -> None:
    node = msgspec.structs.replace(kube_node("empty"), spec=NodeSpec(unschedulable=True))
    fleet.writer.apply([NodeSeen(node)])
    body = fleet.get("/v1/capacity?vram=25Gi").json()
    assert (body["pods"], body["fullness"]) == (0, "fragmented")
    assert body["ineligible"] == [
        {"reason": "cordoned", "message": "cordoned", "nodes": 1, "evictable": False}
    ]
    assert body["reasons"] == [
        {
            "reason": "memory_on_any",
            "message": "insufficient GPU memory on any device",
            "nodes": 1,
            "evictable": True,
        }
    ]


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("vram=lots", "query vram: 'lots' is not valid"),
        ("resource=example.com/gpu", "query resource: requests no GPU that Headroom manages"),
        ("vram=1Gi&resource=cpu", "Example: nvidia.com/gpu"),
        ("vram=1Gi&count=0", "query count: "),
    ],
)
def test_an_invalid_size_is_rejected(fleet: Asked, query: str, shown: str) -> None:
    answer = fleet.get(f"/v1/capacity?{query}")
    assert (answer.status_code, shown in answer.json()["detail"]) == (422, True), answer.text
