"""Checks that a pod fits after a suggestion is followed, and that explanations name the blocking
pods.
"""

import re
from dataclasses import replace

import msgspec
import pytest

from extender.reconcile.queue import Orphan, Unmarked, orphans
from headroom.contract.annotations import DEVICE_CHOICE
from headroom.contract.device_choice import STEERING_NOT_PERMITTED
from headroom.contract.gpunode import Reservation, SmActivity
from headroom.contract.kube import EnvVar, Node, NodeStatus, ObjectMeta, PodStatus
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodGone, PodSeen
from headroom.core.cluster.changes import DepartureMarked
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.rules.pod_requests import QuotaStatus, ResourceQuota
from tests.builders import (
    DISTRIBUTED,
    GIB,
    GPU,
    choosing,
    container,
    gpunode,
    kube_node,
    pod,
    reservation,
    shared,
    use,
)
from tests.console.asking import RULES, STALE_AFTER_S, WALL_S, Asked
from tests.console.explained import WAITS, asked, explained, kinds, node
from tests.console.test_devices import SINCE


def test_the_suggestion_is_to_wait_for_the_smallest_pod_that_frees_enough() -> None:
    fleet = asked(*node("a", tiny=2, large=13), *node("b", whole=20))
    body = explained(fleet)
    assert kinds(body) == ["wait", "lower"]
    wait, lower = body["advice"]  # type: ignore[misc]
    # The end of pod tiny would leave only 11 GiB, and pod whole is larger.
    assert (wait["node"], wait["wait_for"]["name"]) == ("a", "large")
    assert wait["wait_for"]["priority"] == 5
    assert wait["sentence"] == (
        "wait for pod default/large, which holds 13.0 GiB on node a since "
        f"{SINCE[:19]}Z: when it ends, the pod fits"
        " (not checked: CPU, memory and other resources)"
    )
    assert lower["lower_to_bytes"] == 9 * GIB


def test_the_pod_fits_after_following_a_suggestion() -> None:
    events = (*node("a", small=7, other=9), *node("b", whole=20))
    body = explained(asked(*events))
    (wait,) = (one for one in body["advice"] if one["kind"] == "wait")  # type: ignore[attr-defined]
    name = wait["wait_for"]["name"]
    left = {"small": 7, "other": 9}
    del left[name]
    gone = asked(*node("a", free=3, **left), *node("b", whole=20), PodGone(f"u-{name}"))
    assert explained(gone)["verdict"] == "fits"
    (lower,) = (one for one in body["advice"] if one["kind"] == "lower")  # type: ignore[attr-defined]
    text = re.search(r"no more than (\w+), lower", lower["sentence"])
    assert text is not None
    lowered = pod(text.group(1), uid="uw", name="waits")
    assert explained(asked(*events, waits=lowered))["verdict"] == "fits"


def test_pods_that_block_the_nearest_nodes_are_listed_by_size() -> None:
    body = explained(asked(*node("a", tiny=2, small=9)))
    (nearest,) = body["nearest"]  # type: ignore[misc]
    assert [(held["name"], held["phase"]) for held in nearest["blockers"]] == [
        ("small", "running"),
        ("tiny", "running"),
    ]
    assert f"  pod default/small holds 9.0 GiB since {SINCE[:19]}Z, running" in nearest["lines"]


def test_a_pod_with_a_replica_but_without_memory_does_not_block_memory() -> None:
    """A pod that chooses its devices itself may use a different device than the device of its
    replica.
    """
    *others, last = node("a", small=9)
    assert isinstance(last, GPUNodeSeen)
    report = last.gpunode.status
    assert report is not None
    rows = [*report.pods, use("u-elsewhere", "GPU-a", 0, replica="GPU-a::1")]
    status = msgspec.structs.replace(report, pods=rows)
    held = msgspec.structs.replace(last.gpunode, status=status)
    (nearest,) = explained(asked(*others, GPUNodeSeen(held, 0.0)))["nearest"]  # type: ignore[misc]
    assert [each["name"] for each in nearest["blockers"]] == ["small"]


def test_a_node_whose_only_obstacle_is_a_fault_is_suggested_for_repair() -> None:
    now = {"plugin": DISTRIBUTED, "observed_at": "2026-11-21T00:01:40+00:00"}
    sick = gpunode(shared("S", healthy=False, health_reason="XID 79"), name="sick", **now)
    # The device would have too little memory even if it were healthy.
    small = gpunode(shared("M", memory_bytes=8 * GIB, healthy=False), name="small", **now)
    unknown = gpunode(
        shared("U", healthy=False, health_reason="no memory of its own", memory_bytes=0),
        name="unknown",
        **now,
    )
    late = gpunode(shared("L"), name="late", plugin=DISTRIBUTED)
    full = gpunode(
        shared("F", healthy=False, used_bytes=20 * GIB, unattributed_bytes=20 * GIB),
        name="full",
        **now,
    )
    mode = gpunode(shared("E", compute_mode="exclusive-process"), name="mode", **now)
    names = ("sick", "late", "full", "small", "unknown", "mode")
    fleet = asked(
        *(NodeSeen(kube_node(each)) for each in names),
        GPUNodeSeen(late, 0.0),
    )
    fleet.now_s = 100.0
    fleet.writer.apply([GPUNodeSeen(each, 100.0) for each in (sick, full, small, unknown, mode)])
    body = explained(fleet)
    repairs = {one["node"]: one["sentence"] for one in body["advice"] if one["kind"] == "repair"}  # type: ignore[attr-defined]
    assert repairs == {
        "late": "repair node late: the pod would fit there, but GPU report of the node is stale "
        "(not checked: CPU, memory and other resources)",
        "mode": "repair node mode: the pod would fit there, but compute mode of a GPU that the pod "
        "could get allows no other process to use it (E: its compute mode is exclusive-process; to "
        "change it on the node: nvidia-smi -i E -c DEFAULT) (not checked: CPU, memory and other "
        "resources)",
        "sick": "repair node sick: the pod would fit there, but a GPU that the pod could get is "
        "unhealthy (S: XID 79) (not checked: CPU, memory and other resources)",
    }


def test_more_replicas_are_suggested_for_free_memory_without_replicas() -> None:
    body = explained(asked(*node("a", free=0, one=1), *node("b", free=0, two=1)))
    assert kinds(body)[-1] == "replicas"
    assert body["advice"][-1] == {  # type: ignore[index]
        "kind": "replicas",
        "sentence": "raise the replicas that the device plugin advertises on 2 nodes, such as a: "
        "enough "
        "memory is free there, but no replica (not checked: CPU, memory and other resources)",
        "node": None,
        "nodes": 2,
        "lower_to_bytes": None,
        "fix": None,
        "wait_for": None,
    }


@pytest.mark.parametrize(
    ("activity", "do"),
    [
        (
            None,
            "let a source measure SM activity (docs/how-to/sm-activity.md), or remove "
            "headroom.gpu/max-sm",
        ),
        (SmActivity(0.9, "gpm"), "raise or remove headroom.gpu/max-sm"),
    ],
)
def test_a_limit_of_sm_activity_is_reported_if_it_is_the_only_obstacle(
    activity: SmActivity | None, do: str
) -> None:
    busy = gpunode(shared("GPU-a", sm_activity=activity), name="a", plugin=DISTRIBUTED)
    events = NodeSeen(kube_node("a")), GPUNodeSeen(busy, 0.0)
    waits = pod("8Gi", uid="uw", name="waits", annotations={"headroom.gpu/max-sm": "70%"})
    body = explained(asked(*events, waits=waits))
    assert kinds(body) == ["activity"]
    assert body["suggestions"] == [
        f"{do}: without this limit the pod fits on node a (not checked: CPU, memory and other "
        "resources)"
    ]
    larger = pod("30Gi", uid="uw", name="waits", annotations={"headroom.gpu/max-sm": "70%"})
    assert "activity" not in kinds(explained(asked(*events, waits=larger)))


def test_a_suggestion_has_the_yaml_that_applies_it() -> None:
    body = explained(asked(*node("a", one=14)))
    fixes = {each["kind"]: each["fix"] for each in body["advice"]}  # type: ignore[attr-defined]
    assert fixes["lower"].startswith("metadata:\n  annotations:\n    headroom.gpu/vram: ")
    text = fixes["lower"].rpartition(" ")[2].strip('"')
    assert f"needs no more than {text}, lower headroom.gpu/vram to it" in str(body["suggestions"])
    assert fixes["wait"] is None


@pytest.mark.parametrize(("held", "suggested"), [(16, True), (17, False)], ids=["half", "less"])
def test_a_lower_request_is_suggested_only_down_to_half_of_what_the_author_wrote(
    held: int, suggested: bool
) -> None:
    """The GPU has 8 or 7 GiB free, and the pod requests 16 GiB. A program that needs 16 GiB and
    declares 7 GiB would take the memory of other pods.
    """
    body = explained(asked(*node("a", one=held)))
    assert ("lower" in kinds(body)) is suggested


def test_a_pod_that_fits_gets_no_suggestion() -> None:
    body = explained(asked(*node("a")))
    assert (body["verdict"], kinds(body)) == ("fits", [])


def test_equal_devices_are_merged_into_one_line() -> None:
    uuids = [f"GPU-{number}" for number in range(8)]
    free = [shared(uuid, 2) for uuid in uuids]
    held = gpunode(*free, name="a", plugin=DISTRIBUTED)
    body = explained(
        asked(
            NodeSeen(kube_node("a")),
            GPUNodeSeen(held, 0.0),
            waits=pod("25Gi", uid="uw", name="waits"),
        )
    )
    lines = body["nearest"][0]["lines"]  # type: ignore[index]
    assert [line for line in lines if "needs 25.0 GiB" in line] == [lines[1]]
    assert lines[1].startswith("  each of 8 GPUs, such as GPU-0: needs 25.0 GiB")


def quota(hard: str, used: str, resource: str = "requests.nvidia.com/gpu") -> ResourceQuota:
    status = QuotaStatus(hard={resource: hard}, used={resource: used})
    return ResourceQuota(metadata=ObjectMeta(name="team"), status=status)


@pytest.mark.parametrize(
    ("quotas", "first"),
    [
        pytest.param([], "if the program needs no more than 10Gi, lower", id="none"),
        pytest.param(
            [quota("2", "2")], "if the program needs no more than 10Gi", id="exactly used up"
        ),
        pytest.param(
            [quota("1", "2")],
            "raise the quota before you change the pod: ResourceQuota team is exceeded for "
            "requests.nvidia.com/gpu; a pod that is deleted and created again could be rejected",
            id="lowered",
        ),
        pytest.param([quota("300m", "400m", "requests.cpu")], "raise the quota", id="thousandths"),
        pytest.param([quota("1", "2", "services")], "if the program needs", id="of other pods"),
    ],
)
def test_a_change_that_a_quota_would_reject_is_not_suggested(
    quotas: list[ResourceQuota], first: str
) -> None:
    fleet = Asked(quotas=lambda namespace: quotas)
    fleet.writer.apply([*node("a", some=14), PodSeen(WAITS)])
    suggestions = explained(fleet)["suggestions"]
    assert isinstance(suggestions, list)
    lowering = [each for each in suggestions if not each.startswith("wait ")]
    assert [each[: len(first)] for each in lowering] == [first]


def test_unreadable_quotas_are_not_checked() -> None:
    fleet = Asked(quotas=lambda namespace: None)
    fleet.writer.apply([*node("a", some=14), PodSeen(WAITS)])
    body = explained(fleet)
    assert "not checked: ResourceQuotas" in body["suggestions"][-1]  # type: ignore[index]


def test_waiting_is_suggested_on_a_node_without_an_agent() -> None:
    """On such a node, the reservation of an ended pod is removed, although no agent confirms that
    the pod has ended.
    """
    gfd = {"count": "1", "replicas": "4", "memory": "24576", "product": "L4"}
    labels = {f"nvidia.com/gpu.{name}": text for name, text in gfd.items()}
    labels |= {"nvidia.com/gpu.sharing-strategy": "time-slicing"}
    labelled = Node(
        ObjectMeta(name="n", labels=labels), status=NodeStatus(allocatable={"nvidia.com/gpu": "4"})
    )
    holder = pod("20Gi", uid="u-holder", name="holder", node="n", phase="Running")

    def ledger(version: str, reservations: dict[str, Reservation]) -> GPUNodeSeen:
        return GPUNodeSeen(gpunode(name="n", version=version, reservations=reservations), 0.0)

    reserved = {"u-holder": reservation({"label-0": 20 * GIB}, name="holder")}
    rules = replace(RULES, require_report=False)
    fleet = Asked(writer=ClusterWriter(rules, STALE_AFTER_S, epoch_s=WALL_S))
    fleet.writer.apply([NodeSeen(labelled), PodSeen(holder), ledger("1", reserved), PodSeen(WAITS)])
    body = explained(fleet)
    (wait,) = (one for one in body["advice"] if one["kind"] == "wait")  # type: ignore[attr-defined]
    assert wait["wait_for"]["name"] == "holder"

    succeeded = msgspec.structs.replace(holder, status=PodStatus(phase="Succeeded"))
    fleet.writer.apply([PodSeen(succeeded)])
    assert orphans(fleet.cluster, WALL_S, 60.0) == [Orphan("n", "u-holder")]
    fleet.writer.apply([ledger("2", {})])
    assert explained(fleet)["verdict"] == "fits"

    # The pod was deleted while no watch ran, so it counts as ended after 2 minutes.
    fleet.writer.apply([PodSeen(holder), ledger("3", reserved), PodGone("u-holder", is_last=False)])
    (gone,) = orphans(fleet.cluster, WALL_S + fleet.now_s, 60.0)
    assert isinstance(gone, Unmarked)
    fleet.writer.apply([DepartureMarked("n", "u-holder", "", fleet.now_s)])
    later_s = WALL_S + fleet.now_s + 121.0
    assert orphans(fleet.cluster, later_s, 60.0) == [Orphan("n", "u-holder", left=True)]


@pytest.mark.parametrize("permitted", [True, False, None])
def test_steering_is_suggested_if_only_the_plugins_choice_rejects_the_pod(
    permitted: bool | None,
) -> None:
    plugin = msgspec.structs.replace(DISTRIBUTED, steering_permitted=permitted)
    full = {"used_bytes": 20 * GIB, "unattributed_bytes": 20 * GIB}
    devices = shared("next", free=4, **full), shared("other", free=3, allocated=1)
    fleet = asked(
        NodeSeen(kube_node("a")), GPUNodeSeen(gpunode(*devices, name="a", plugin=plugin), 0.0)
    )
    body = explained(fleet)
    (reason,) = body["reasons"]  # type: ignore[misc]
    assert reason["reason"] == Reason.MEMORY_ON_SOME.code
    (steer,) = (one for one in body["advice"] if one["kind"] == "steer")  # type: ignore[attr-defined]
    assert (steer["node"], steer["nodes"]) == ("a", 1)
    command = "kubectl annotate --overwrite node a headroom.gpu/device-choice=steered"
    unchecked = " (not checked: CPU, memory and other resources)"
    if permitted is None:
        unchecked = unchecked.replace(")", ", whether the agent may steer)")
    to_do = command
    if permitted is False:
        to_do = f"steering node a is {STEERING_NOT_PERMITTED}; permit it, then {command}"
    assert steer["sentence"] == (
        f"steer node a: the pod would fit there if Headroom chose the device{unchecked}; {to_do}"
    )
    assert kinds(body) == ["steer"]
    # The pod fits after the suggestion is followed.
    steered = msgspec.structs.replace(plugin, steered=[GPU])
    fleet.writer.apply(
        [
            NodeSeen(kube_node("a", {DEVICE_CHOICE: "steered"})),
            GPUNodeSeen(gpunode(*devices, name="a", version="2", plugin=steered), 0.0),
        ]
    )
    assert explained(fleet)["verdict"] == "fits"


def test_steering_is_suggested_with_the_gpus_that_a_container_with_several_would_get() -> None:
    plugin = msgspec.structs.replace(DISTRIBUTED, steering_permitted=True)
    full = {"used_bytes": 20 * GIB, "unattributed_bytes": 20 * GIB}
    devices = (
        shared("next", free=4, **full),
        *(shared(each, free=3, allocated=1) for each in ("b", "c")),
    )
    wide = pod("16Gi", container(gpus=2), uid="uw", name="waits")
    fleet = asked(
        NodeSeen(kube_node("a")),
        GPUNodeSeen(gpunode(*devices, name="a", plugin=plugin), 0.0),
        waits=wide,
    )
    body = explained(fleet)
    (nearest,) = body["nearest"]  # type: ignore[misc]
    assert (
        "  a container requests 2 nvidia.com/gpu, which the device plugin can allocate on one GPU; "
        "on a steered node, each is on a GPU of its own"
    ) in nearest["lines"]
    (steer,) = (one for one in body["advice"] if one["kind"] == "steer")  # type: ignore[attr-defined]
    assert steer["sentence"] == (
        "steer node a: the pod would fit there if Headroom chose 2 different GPUs with 16.0 GiB "
        "each (not checked: CPU, memory and other resources); "
        "kubectl annotate --overwrite node a headroom.gpu/device-choice=steered"
    )


def test_overuse_on_one_gpu_of_the_best_set_is_named() -> None:
    """Two GPUs would have 16 GiB without the overuse of pod over. Pod full has the third GPU."""
    plugin = msgspec.structs.replace(
        DISTRIBUTED, steered=[GPU], steers_several=True, fail_requests_greater_than_one=False
    )
    devices = (
        shared("a", 3, 1, used_bytes=12 * GIB),
        shared("b", 3, 1),
        shared("c"),
    )
    reservations = {
        "u-over": reservation({"a": 4 * GIB}, name="over", choices=["a"]),
        "u-full": reservation({"b": 22 * GIB}, name="full", choices=["b"]),
    }
    rows = [use("u-over", "a", 12 * GIB, replica="a::0"), use("u-full", "b", replica="b::0")]
    held = gpunode(*devices, name="n", reservations=reservations, pods=rows, plugin=plugin)
    fleet = asked(
        NodeSeen(kube_node("n", {DEVICE_CHOICE: "steered"})),
        GPUNodeSeen(held, 0.0),
        PodSeen(pod("4Gi", uid="u-over", name="over", node="n", phase="Running")),
        PodSeen(pod("22Gi", uid="u-full", name="full", node="n", phase="Running")),
        waits=pod("16Gi", container(gpus=2), uid="uw", name="waits"),
    )
    body = explained(fleet)
    (reason,) = body["reasons"]  # type: ignore[misc]
    assert reason["reason"] == Reason.TOO_FEW_DEVICES.code
    (overuse,) = (one for one in body["advice"] if one["kind"] == "overuse")  # type: ignore[attr-defined]
    assert overuse["sentence"].startswith(
        "limit pod default/over on node n, which uses 8.0 GiB more than it reserved"
    )


def test_the_list_of_pending_pods_shows_pods_that_steering_would_place() -> None:
    plugin = msgspec.structs.replace(DISTRIBUTED, steering_permitted=True)
    full = {"used_bytes": 20 * GIB, "unattributed_bytes": 20 * GIB}
    devices = shared("next", free=4, **full), shared("other", free=3, allocated=1)
    fleet = asked(
        NodeSeen(kube_node("a")),
        GPUNodeSeen(gpunode(*devices, name="a", plugin=plugin), 0.0),
        PodSeen(pod("12Gi", uid="u2", name="second")),
    )
    assert fleet.get("/v1/pending").json()["steering"] is None
    assert fleet.get("/v1/pending?steering=true").json()["steering"] == {
        "sentence": "2 pending pods with 28.0 GiB wait although a GPU has enough free memory for "
        "each of them, because the device plugin chooses the device; steering 1 node would place 1 "
        "of them (12.0 GiB)",
        "waiting_pods": 2,
        "waiting_bytes": 28 * GIB,
        "placed_pods": 1,
        "placed_bytes": 12 * GIB,
        "nodes": ["a"],
        "to_do": "kubectl annotate --overwrite node a headroom.gpu/device-choice=steered",
    }
    assert fleet.get("/v1/pending?steering=true&limit=1").json()["remaining"] == 1


def test_a_pod_that_starts_alone_shows_the_pod_that_it_waits_for() -> None:
    """Node a has enough memory for the pod, and node b does not."""
    *events, last = node("a", loads=8, runs=4)
    assert isinstance(last, GPUNodeSeen)
    spec = last.gpunode.spec
    starting = msgspec.structs.replace(
        spec.reservations["u-loads"], phase="starting", start_timeout_s=600
    )
    reservations = {**spec.reservations, "u-loads": starting}
    starts = msgspec.structs.replace(
        last.gpunode, spec=msgspec.structs.replace(spec, reservations=reservations)
    )
    alone = pod("8Gi", uid="uw", name="waits", annotations={"headroom.gpu/startup": "alone"})
    body = explained(asked(*events, GPUNodeSeen(starts, 0.0), *node("b", full=20), waits=alone))
    nearest = body["nearest"][0]  # type: ignore[index]
    assert (nearest["node"], nearest["reason"]) == ("a", "other_starting")
    assert [(each["name"], each["phase"]) for each in nearest["blockers"]] == [
        ("loads", "starting")
    ]
    assert "  pod default/loads holds 8.0 GiB since" in "\n".join(nearest["lines"])
    assert (
        body["suggestions"][0]
        == (  # type: ignore[index]
            "wait for pod default/loads, which is starting on node a since "
            f"{SINCE[:19]}Z: when it has started, the pod fits"
            " (not checked: CPU, memory and other resources)"
        )
    )


def test_a_pod_larger_than_any_gpu_is_not_told_to_request_a_fraction_of_its_need() -> None:
    body = explained(asked(*node("a", some=20), waits=pod("500Gi", uid="uw", name="waits")))
    assert "lower" not in kinds(body)
    assert "larger than any GPU that it may use (24.0 GiB)" in str(body["message"])
    near = explained(asked(*node("a"), waits=pod("25Gi", uid="uw", name="waits")))
    assert kinds(near) == ["lower"]


def test_a_pod_that_chooses_its_gpus_itself_is_told_to_remove_the_variable() -> None:
    chooses = choosing(container(), EnvVar("NVIDIA_VISIBLE_DEVICES", "all"))
    waits = pod("4Gi", chooses, uid="uw", name="waits")
    body = explained(asked(*node("a"), waits=waits))
    assert kinds(body) == ["variable"]
    assert body["suggestions"] == [
        "remove NVIDIA_VISIBLE_DEVICES from the env of the pod's containers, and from their "
        "envFrom: without it the pod fits on node a (not checked: CPU, memory and other resources)"
    ]
