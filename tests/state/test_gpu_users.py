"""Checks that pods that use GPUs without a request are found by their uid, and named in lists and
sums.
"""

import asyncio
import time
from collections.abc import Sequence

import msgspec
import pytest

from headroom.console.gpu_user_reader import AGAIN_AFTER_S, MOST_TRIES, GpuUserReader
from headroom.console.history.holdings import of_node
from headroom.contract.gpunode import PodUse
from headroom.contract.kube import OwnerReference, Pod
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen, Relisted
from headroom.core.cluster.trackers.gpu_users import unreserved_users
from headroom.doctor.findings import Weight, line
from headroom.doctor.node_rules import examine_nodes
from headroom.doctor.pod_rules import examine_users
from headroom.errors import StoreError
from headroom.runtime.settings.settings import Settings
from tests.builders import GIB, container, gpunode, kube_node, pod, reservation, shared, use
from tests.console.asking import WALL_S, Asked

USER = pod(None, container(gpus=0), uid="ray", name="head", node="n", phase="Running")


def report(*uses: PodUse, name: str = "n", **held: object) -> GPUNodeSeen:
    used = sum(each.used_bytes or 0 for each in uses)
    made = gpunode(shared("a", used_bytes=used), name=name, pods=uses, reservations=held)
    return GPUNodeSeen(made, 0.0)


BY_UID = report(use("ray", "a", 9 * GIB, namespace="", name="", replica=""))


class ApiServer:
    """Lists the pods of a node."""

    def __init__(self, *pods: Pod, fails: bool = False) -> None:
        self.pods = pods
        self.fails = fails
        self.asked: list[str] = []

    def on(self, node: str) -> Sequence[Pod]:
        self.asked.append(node)
        if self.fails:
            raise StoreError("no answer")
        return [each for each in self.pods if each.node == node]


def fleet(*events: object) -> Asked:
    made = Asked(1.0)
    made.writer.apply([NodeSeen(kube_node("n")), *events])  # type: ignore[list-item]
    return made


def reader_of(asked: Asked, api: ApiServer) -> GpuUserReader:
    return GpuUserReader(asked.cluster, api.on, asked.writer.apply)


def round_of(reader: GpuUserReader, now_s: float) -> None:
    asyncio.run(reader.once(now_s))


def test_pods_of_a_report_without_a_reservation_may_be_unknown() -> None:
    rows = [
        use("ray", "a", GIB, namespace="", name="", replica=""),
        use("other", "a", GIB, replica="a::0"),
        use("reserved", "a", GIB, namespace="", name="", replica=""),
    ]
    held = report(*rows, reserved=reservation({"a": GIB}))
    assert unreserved_users(held.gpunode) == {"ray", "other"}
    assert unreserved_users(gpunode()) == frozenset()


def test_all_lists_of_gpu_memory_by_pod_contain_the_pod() -> None:
    owner = OwnerReference(kind="RayCluster", name="ray", uid="o", controller=True)
    metadata = msgspec.structs.replace(USER.metadata, owner_references=[owner])
    asked = fleet(BY_UID)
    assert asked.get("/v1/pods").json()["pods"] == []
    reader = reader_of(asked, ApiServer(msgspec.structs.replace(USER, metadata=metadata)))
    round_of(reader, 1.0)
    (row,) = asked.get("/v1/pods").json()["pods"]
    assert (row["namespace"], row["name"], row["node"]) == ("default", "head", "n")
    assert (row["used_bytes"], row["reserved_bytes"]) == (9 * GIB, 0)
    assert (row["states"], row["request"]) == (["running", "unreserved"], "none")
    assert (row["owner_kind"], row["owner_name"]) == ("RayCluster", "ray")
    (team,) = asked.get("/v1/teams").json()["teams"]
    assert (team["namespace"], team["used_bytes"]) == ("default", 9 * GIB)
    snap = asked.cluster.snapshot()
    held = of_node(asked.cluster, BY_UID.gpunode, snap.nodes[0].devices, True, WALL_S)
    assert {name: each.used_bytes for name, each in held.items()} == {"default": 9 * GIB}
    (holder,) = asked.get("/v1/nodes/n/devices/a").json()["holders"]
    assert (holder["namespace"], holder["name"], holder["phase"]) == ("default", "head", "running")


def test_a_pod_with_an_unmanaged_resource_counts_for_its_own_namespace() -> None:
    """The kubelet gave the pod a replica, so the agent reports the pod's name."""
    other = pod(None, container(resource="nvidia.com/a100"), uid="o", name="other", node="n")
    asked = fleet(report(use("o", "a", GIB, name="other", replica="a::0")))
    round_of(reader_of(asked, ApiServer(other)), 1.0)
    (row,) = asked.get("/v1/pods").json()["pods"]
    assert (row["namespace"], row["name"]) == ("default", "other")
    assert row["request"] == "nvidia.com/a100"
    (team,) = asked.get("/v1/teams").json()["teams"]
    assert (team["namespace"], team["used_bytes"]) == ("default", GIB)
    assert not list(examine_users(asked.cluster))  # Another finding names the resource.


def test_pods_are_listed_once_and_only_for_the_node_of_an_unknown_pod() -> None:
    api = ApiServer(USER)
    known = report(use("k", "a", GIB, replica="a::0"), name="other")
    bound = PodSeen(pod("1Gi", uid="k", node="other"))
    asked = fleet(NodeSeen(kube_node("other")), bound, known, BY_UID)
    reader = reader_of(asked, api)
    for now_s in (1.0, 11.0, 1000.0):
        round_of(reader, now_s)
    assert api.asked == ["n"]
    assert set(asked.cluster.gpu_users) == {"ray"}
    asked.writer.apply([report()])
    round_of(reader, 1010.0)
    assert not asked.cluster.gpu_users


@pytest.mark.parametrize("api", [ApiServer(), ApiServer(USER, fails=True)], ids=["gone", "fails"])
def test_a_missing_pod_is_looked_up_a_few_times(api: ApiServer) -> None:
    """A process can outlive its pod."""
    reader = reader_of(fleet(BY_UID), api)
    for number in range(100):
        round_of(reader, 1.0 + number * AGAIN_AFTER_S / 2)
    assert api.asked == ["n"] * MOST_TRIES


def test_the_doctor_reports_pods_that_use_gpus_without_a_request() -> None:
    asks = pod("4Gi", uid="asks", name="asks", node="n")
    forgotten = use("asks", "a", GIB, namespace="", name="", replica="")
    now_s = time.monotonic()
    seen = report(forgotten, use("ray", "a", GIB, namespace="", name="", replica=""))
    events = [
        NodeSeen(kube_node("n")),
        GPUNodeSeen(seen.gpunode, now_s),
        Relisted(Pod, (USER, asks), now_s),
    ]
    found = [each for each in examine_nodes(Settings(), events) if "request none" in each.found]
    assert [(each.weight, each.nodes) for each in found] == [(Weight.WARNING, ("default/head",))]
    assert "NVIDIA_VISIBLE_DEVICES: void" in line(found[0])
