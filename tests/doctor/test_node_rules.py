"""Tests the doctor's findings about a node, and nodes without findings."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from headroom.contract.annotations import CORDON, DEVICE_CHOICE, RESERVE
from headroom.contract.gpunode import GPUNode, Plugin, Replicas
from headroom.contract.kube import Node, NodeStatus, ObjectMeta, Pod
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.doctor.findings import Finding, Weight, line
from headroom.doctor.node_rules import examine
from headroom.doctor.recent_requests import NO_RECENT, RecentRequests
from headroom.doctor.sharing_rules import rounded
from tests.builders import (
    GIB,
    GPU,
    NOW_S,
    container,
    device,
    gpunode,
    pod,
    reservation,
    shared,
)
from tests.state import dra
from tests.state.states import state_of

#: A plugin without findings.
SOUND = Plugin(
    allocation_policy="distributed",
    topology_manager_policy="none",
    fail_requests_greater_than_one=True,
)


def sliced(replicas: int = 3, **how: Any) -> GPUNode:
    """Return two unused GPUs of 24 GiB."""
    plugin = msgspec.structs.replace(SOUND, **how)
    return gpunode(shared("a", replicas), shared("b", replicas), plugin=plugin)


def asking(*sizes: str | None) -> list[Pod]:
    return [pod(size, uid=f"u{i}", name=f"p{i}") for i, size in enumerate(sizes)]


def findings(
    *gpunodes: GPUNode,
    pods: Sequence[Pod] = (),
    annotations: dict[str, str] | None = None,
    names: Sequence[str] = ("n",),
    now_s: float = NOW_S,
    offers: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
    recent: RecentRequests = NO_RECENT,
) -> list[Finding]:
    nodes = [
        Node(
            metadata=ObjectMeta(name=name, uid=name, annotations=annotations, labels=labels),
            status=NodeStatus(allocatable={GPU: "8"} if offers is None else offers),
        )
        for name in names
    ]
    state = state_of(
        *map(NodeSeen, nodes),
        *(GPUNodeSeen(one, NOW_S) for one in gpunodes),
        *map(PodSeen, pods),
    )
    return examine(state.cluster, now_s, recent=recent)


def only(found: Sequence[Finding]) -> Finding:
    (one,) = found
    return one


@pytest.mark.parametrize(
    ("node", "size"),
    [
        pytest.param(sliced(), "8Gi", id="time-sliced"),
        pytest.param(gpunode(device("a"), device("b"), plugin=Plugin()), "20Gi", id="unshared"),
    ],
)
def test_a_healthy_node_has_no_findings(node: GPUNode, size: str) -> None:
    assert findings(node, pods=asking(*[size] * 6)) == []


def test_nodes_without_managed_gpus_are_skipped() -> None:
    assert findings(offers={"cpu": "8"}) == []


@pytest.mark.parametrize(
    ("nodes", "how", "weight", "says", "helps"),
    [
        pytest.param([], {}, Weight.WARNING, "no GPU report", "agent runs", id="no agent"),
        pytest.param(
            [sliced()], {"now_s": NOW_S + 1000}, Weight.WARNING, "stale", "agent runs", id="stale"
        ),
        pytest.param(
            [msgspec.structs.replace(sliced(), spec=gpunode(initialised=False).spec)],
            {},
            Weight.WARNING,
            "being set up",
            "an extender runs",
            id="no ledger",
        ),
        pytest.param(
            [sliced()],
            {"annotations": {RESERVE: "lots"}},
            Weight.WARNING,
            f"takes no pods: annotation {RESERVE}: 'lots' is not valid",
            "correct the annotation, or remove it",
            id="an annotation that cannot be read",
        ),
        pytest.param(
            [sliced()],
            {"annotations": {CORDON: "GPU 1"}},
            Weight.WARNING,
            f"takes no pods: annotation {CORDON}: 'GPU 1' ",
            "correct the annotation, or remove it",
            id="a cordon that cannot be read",
        ),
        pytest.param(
            [sliced()],
            {"annotations": {DEVICE_CHOICE: "steerd"}},
            Weight.WARNING,
            f"takes no pods: annotation {DEVICE_CHOICE}: 'steerd' is not one of predicted, gated, ",
            "correct the annotation, or remove it",
            id="a device choice that cannot be read",
        ),
        pytest.param(
            [sliced()],
            {"annotations": {CORDON: "GPU-x"}},
            Weight.WARNING,
            f"annotation {CORDON} names GPU-x, which is no GPU of the node",
            "kubectl headroom uncordon n GPU-x; kubectl headroom top gpu",
            id="a cordoned GPU that the node does not have",
        ),
        pytest.param(
            [sliced()],
            {"annotations": {CORDON: "a"}},
            Weight.ADVICE,
            "GPU a is cordoned and the device plugin's next choice",
            f"{DEVICE_CHOICE}=steered, or uncordon it: kubectl headroom uncordon n a",
            id="a cordoned GPU that closes the others",
        ),
        pytest.param(
            [sliced()],
            {"annotations": {DEVICE_CHOICE: "any"}},
            Weight.WARNING,
            f"takes no pods: annotation {DEVICE_CHOICE}: 'any' was removed: use predicted or ",
            "correct the annotation, or remove it",
            id="a device choice that was removed",
        ),
        pytest.param(
            [sliced()],
            {"labels": {"nvidia.com/mig.config.state": "failed"}},
            Weight.WARNING,
            "label nvidia.com/mig.config.state is 'failed'",
            "MIG manager",
            id="MIG that could not be changed",
        ),
        pytest.param(
            [sliced(allocation_policy="packed")],
            {},
            Weight.ADVICE,
            "policy packed",
            "sharedDevicesAllocationPolicy: distributed",
            id="packed",
        ),
        pytest.param(
            [sliced(allocation_policy="unknown")],
            {},
            Weight.ADVICE,
            "is not known",
            "plugin's configuration",
            id="unknown policy",
        ),
        pytest.param(
            [sliced(fail_requests_greater_than_one=None)],
            {},
            Weight.ADVICE,
            "several replicas",
            "failRequestsGreaterThanOne: true",
            id="several replicas are allowed",
        ),
        pytest.param(
            [sliced(fail_requests_greater_than_one=None, steered=[GPU], steers_several=True)],
            {},
            Weight.ADVICE,
            "not known whether the device plugin rejects containers with several replicas",
            "plugin's configuration",
            id="several replicas on a steered node, and the plugin's setting is unknown",
        ),
        pytest.param(
            [sliced(2)],
            {"pods": asking(*["4Gi"] * 6)},
            Weight.ADVICE,
            "replicas run out",
            "set replicas: 6",
            id="too few replicas",
        ),
    ],
)
def test_each_rule_gives_its_finding(
    nodes: list[GPUNode], how: dict[str, Any], weight: Weight, says: str, helps: str
) -> None:
    found = only(findings(*nodes, **how))
    assert (found.weight, found.nodes) == (weight, ("n",))
    assert says in found.found
    assert helps in found.do


def test_several_replicas_are_no_finding_on_a_steered_node() -> None:
    steered = {"steered": [GPU], "steers_several": True}
    annotations = {DEVICE_CHOICE: "steered"}
    allowed = sliced(fail_requests_greater_than_one=False, **steered)
    assert findings(allowed, annotations=annotations) == []
    stock = sliced(fail_requests_greater_than_one=False)
    assert "several replicas" in only(findings(stock)).found


@pytest.mark.parametrize(
    ("policy", "says"),
    [("", "policy is not known"), ("restricted", "policy is restricted"), ("none", "")],
)
def test_alignment_costs_memory_on_several_numa_nodes(policy: str, says: str) -> None:
    plugin = msgspec.structs.replace(SOUND, topology_manager_policy=policy)
    apart = [shared("a", 3, numa_node=0), shared("b", 3, numa_node=1)]
    found = findings(gpunode(*apart, plugin=plugin))
    assert [says in each.found for each in found] == ([True] if says else [])
    assert findings(gpunode(*apart[:1], plugin=plugin)) == []


def test_no_surprise_harms_if_replicas_match_pods_of_similar_size() -> None:
    """Pods of 6 to 8 GiB run on 24 GiB, and each of three replicas has a share of 8 GiB."""
    alike = asking("6Gi", *["8Gi"] * 5)
    found = only(findings(sliced(10), pods=alike))
    assert "set replicas: 3" in found.do
    assert "no choice of the device plugin can overcommit" in found.do
    assert findings(sliced(3), pods=alike) == []


def test_many_replicas_cost_no_memory_if_pods_differ_in_size() -> None:
    assert findings(sliced(10), pods=asking(*["4Gi"] * 5, "20Gi")) == []


def test_many_replicas_cost_much_memory_if_the_plugin_packs() -> None:
    pods = asking(*["4Gi"] * 5, "20Gi")
    packs, replicas = findings(sliced(10, allocation_policy="packed"), pods=pods)
    assert "policy packed" in packs.found
    assert "stays the next choice" in replicas.found
    assert "set replicas: 6" in replicas.do


def test_a_few_pods_give_no_finding() -> None:
    ended = pod("4Gi", uid="ended", name="ended", phase="Succeeded")
    assert findings(sliced(2), pods=[*asking(*["4Gi"] * 4), ended]) == []


def test_pods_without_an_annotation_get_a_small_share_with_many_replicas() -> None:
    pods = asking(*["8Gi"] * 5, "20Gi", None, None)
    found = only(findings(sliced(10), pods=pods))
    assert found.weight is Weight.WARNING
    assert found.found.startswith("2 GPU containers request nvidia.com/gpu without an amount")
    assert "headroom.gpu/vram: 8Gi" in found.do
    assert findings(sliced(3), pods=pods) == []


def test_pods_that_never_fit_because_of_mps_are_reported() -> None:
    served = shared("a", sharing="mps", replicas=Replicas(free=4))
    found = only(findings(gpunode(served, plugin=SOUND), pods=asking(*["4Gi"] * 5, "8Gi")))
    assert "each process of nvidia.com/gpu to 6Gi (4 replicas)" in found.found
    assert "set replicas: 3 or fewer" in found.do
    assert findings(gpunode(served, plugin=SOUND), pods=asking(*["6Gi"] * 6)) == []


def test_nodes_with_equal_findings_are_reported_together() -> None:
    names = [f"n{i}" for i in range(7)]
    found = only(findings(names=names))
    assert found.nodes == tuple(names)
    assert line(found).startswith("warning: n0, n1, n2, n3, n4 and 2 more: takes no pods")


def test_warnings_come_first() -> None:
    plugin = msgspec.structs.replace(SOUND, allocation_policy="packed")
    found = findings(gpunode(shared("a", 3), name="a", plugin=plugin), names=["a", "b"])
    assert [(each.weight, each.nodes) for each in found] == [
        (Weight.WARNING, ("b",)),
        (Weight.ADVICE, ("a",)),
    ]


@pytest.mark.parametrize(
    ("count_bytes", "text"),
    [(8 * GIB, "8Gi"), (79 * GIB - 1, "78.9Gi"), (100_000_000, "95.3Mi"), (5, "5")],
)
def test_bytes_are_formatted_for_people(count_bytes: int, text: str) -> None:
    assert rounded(count_bytes) == text


STEERED_ANNOTATION = {DEVICE_CHOICE: "steered"}


@pytest.mark.parametrize(
    ("plugin", "why"),
    [
        pytest.param({}, "its agent has not reported that it steers", id="not reported"),
        pytest.param({"choice_obstacle": "not permitted"}, "not permitted", id="an obstacle"),
    ],
)
def test_a_node_that_requests_steering_but_is_not_steered_is_reported(
    plugin: dict[str, Any], why: str
) -> None:
    found = only(findings(sliced(**plugin), annotations=STEERED_ANNOTATION))
    assert found.weight is Weight.WARNING
    assert found.found == (
        f"annotation {DEVICE_CHOICE}: steered has no effect: {why}; "
        "pods are placed there as on any other node"
    )
    assert f"kubectl annotate node n {DEVICE_CHOICE}-" in found.do


def test_a_steered_node_has_no_findings() -> None:
    assert findings(sliced(steered=[GPU]), annotations=STEERED_ANNOTATION) == []


def test_containers_are_counted_instead_of_pods() -> None:
    """Three pods of two containers each are enough for a finding."""
    both = [container("main"), container("helper")]
    pods = [pod("4Gi", *both, uid=f"u{i}", name=f"p{i}") for i in range(3)]
    found = only(findings(sliced(2), pods=pods))
    assert found.found.startswith(
        "each nvidia.com/gpu device of 24Gi has 2 replicas, and at least a quarter of 6 GPU "
        "containers (from 3 pods that exist now) request 4Gi or less: replicas run out"
    )


def test_a_compute_mode_that_conflicts_with_time_slicing_is_reported() -> None:
    exclusive = [shared(each, compute_mode="exclusive-process") for each in "ab"]
    sharing = gpunode(*exclusive, plugin=SOUND)
    found = only(findings(sharing, offers={GPU: "6"}))
    assert found.weight is Weight.WARNING
    assert found.found == (
        "GPUs have compute mode exclusive-process, so pods that share them by time slicing fail, "
        "and Headroom places none there"
    )
    assert "nvidia-smi -i GPU -c DEFAULT" in line(found)
    alone = gpunode(device("a", compute_mode="exclusive-process"), plugin=Plugin())
    assert findings(alone, offers={GPU: "1"}) == []
    prohibited = gpunode(device("a", compute_mode="prohibited"), plugin=Plugin())
    assert only(findings(prohibited, offers={GPU: "1"})).found == (
        "GPUs have compute mode prohibited, so pods fail, and Headroom places none there"
    )


def test_unmanaged_gpu_resources_are_a_warning() -> None:
    labels = {"nvidia.com/gpu.count": "2"}
    one = only(findings(offers={"nvidia.com/a100": "2"}, labels=labels))
    assert (one.weight, one.nodes) == (Weight.WARNING, ("n",))
    assert "offers GPUs as nvidia.com/a100, which Headroom does not manage" in one.found
    assert "add nvidia.com/a100 to the setting resources" in one.do


def test_a_node_that_offers_gpus_by_plugin_and_by_dra_is_reported() -> None:
    state = state_of(
        dra.node(allocatable={GPU: "8"}),
        dra.slice_of(),
        dra.class_of(),
        GPUNodeSeen(sliced(), NOW_S),
    )
    found = examine(state.cluster, NOW_S)[0]
    assert (found.weight, found.nodes) == (Weight.WARNING, ("n",))
    assert "offered by a device plugin and by a DRA driver" in found.found
    assert "remove the device plugin" in found.do


def test_a_missing_plugin_with_remaining_pods_is_reported() -> None:
    held = {"old": reservation({"a": GIB})}
    report = gpunode(shared("a"), reservations=held, plugin=SOUND)
    state = state_of(dra.node(), dra.slice_of(), dra.class_of(), GPUNodeSeen(report, NOW_S))
    assert (
        "offered by a device plugin and by a DRA driver" in examine(state.cluster, NOW_S)[0].found
    )


@pytest.mark.parametrize("allocatable", [{}, {GPU: "0"}])
def test_a_node_where_only_dra_allocates_has_no_findings(allocatable: dict[str, str]) -> None:
    report = gpunode(shared("a", 0, resource=""), plugin=SOUND)
    state = state_of(
        dra.node(allocatable=allocatable),
        dra.slice_of(),
        dra.class_of(),
        GPUNodeSeen(report, NOW_S),
    )
    assert examine(state.cluster, NOW_S) == []
