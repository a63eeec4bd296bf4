"""Suggestions help when they are followed, and explanations name the pods that block."""

import re
from dataclasses import replace
from datetime import datetime, timedelta

import msgspec
import numpy as np
import pytest

from contract.annotations import DEVICE_CHOICE
from contract.decision import decision_id
from contract.device_choice import STEERING_NOT_PERMITTED
from contract.gpunode import Reservation
from contract.kube import Node, NodeStatus, ObjectMeta, Pod, PodStatus
from contract.reasons import Reason
from extender.state.changes import (
    DepartureMarked,
    Event,
    GPUNodeSeen,
    NodeSeen,
    PodGone,
    PodSeen,
)
from extender.state.cluster_writer import ClusterWriter
from extender.state.journal import Decision, NodeSets
from extender.state.pod_requests import QuotaStatus, ResourceQuota
from extender.state.reconcile_queue import Orphan, Unmarked, orphans
from tests.builders import DISTRIBUTED, GIB, GPU, gpunode, kube_node, pod, reservation, shared, use
from tests.console.asking import RULES, STALE_AFTER_S, WALL_S, Asked
from tests.console.test_devices import SINCE, since

WAITS = pod("16Gi", uid="uw", name="waits")


def node(name: str, free: int = 2, **sizes: int) -> list[Event]:
    """One GPU of 24 GiB with pods of these sizes on it."""
    uuid = f"GPU-{name}"
    reservations: dict[str, Reservation] = {
        f"u-{who}": since(reservation({uuid: gib * GIB}, name=who)) for who, gib in sizes.items()
    }
    rows = [use(f"u-{who}", uuid, replica=f"{uuid}::{n}") for n, who in enumerate(sizes)]
    held = gpunode(
        shared(uuid, free=free, allocated=len(sizes)),
        name=name,
        reservations=reservations,
        pods=rows,
        plugin=DISTRIBUTED,
    )
    pods = [
        PodSeen(pod(f"{gib}Gi", uid=f"u-{who}", name=who, node=name, phase="Running", priority=5))
        for who, gib in sizes.items()
    ]
    return [NodeSeen(kube_node(name)), *pods, GPUNodeSeen(held, 0.0)]


def asked(*events: Event, waits: Pod = WAITS) -> Asked:
    found = Asked()
    found.cluster.apply([*events, PodSeen(waits)])
    return found


def explained(fleet: Asked) -> dict[str, object]:
    answer = fleet.get("/v1/explain/pods/default/waits")
    assert answer.status_code == 200, answer.text
    body: dict[str, object] = answer.json()
    return body


def kinds(body: dict[str, object]) -> list[str]:
    given = body["advice"]
    assert isinstance(given, list)
    assert body["suggestions"] == [one["sentence"] for one in given]
    return [one["kind"] for one in given]


def test_the_suggestion_waits_for_the_smallest_pod_whose_end_helps() -> None:
    fleet = asked(*node("a", tiny=2, large=13), *node("b", whole=20))
    body = explained(fleet)
    assert kinds(body) == ["lower", "wait"]
    lower, wait = body["advice"]  # type: ignore[misc]
    # Not tiny, after which there are 11 GiB; nor whole, which is larger.
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
    text = re.search(r"to (\w+) or less", lower["sentence"])
    assert text is not None
    lowered = pod(text.group(1), uid="uw", name="waits")
    assert explained(asked(*events, waits=lowered))["verdict"] == "fits"


def test_pods_that_block_the_nearest_nodes_are_listed_the_largest_first() -> None:
    body = explained(asked(*node("a", tiny=2, small=9)))
    (nearest,) = body["nearest"]  # type: ignore[misc]
    assert [(held["name"], held["phase"]) for held in nearest["blockers"]] == [
        ("small", "running"),
        ("tiny", "running"),
    ]
    assert f"  pod default/small holds 9.0 GiB since {SINCE[:19]}Z, running" in nearest["lines"]


def test_a_pod_with_a_replica_but_without_memory_blocks_no_memory() -> None:
    """A pinned pod uses the device of its placement, whichever replica the plugin gave it."""
    *others, last = node("a", small=9)
    assert isinstance(last, GPUNodeSeen)
    report = last.gpunode.status
    assert report is not None
    rows = [*report.pods, use("u-elsewhere", "GPU-a", 0, replica="GPU-a::1")]
    status = msgspec.structs.replace(report, pods=rows)
    held = msgspec.structs.replace(last.gpunode, status=status)
    (nearest,) = explained(asked(*others, GPUNodeSeen(held, 0.0)))["nearest"]  # type: ignore[misc]
    assert [each["name"] for each in nearest["blockers"]] == ["small"]


def test_a_node_with_only_one_fault_is_suggested_for_repair() -> None:
    now = {"plugin": DISTRIBUTED, "observed_at": "2026-11-21T00:01:40+00:00"}
    sick = gpunode(shared("S", healthy=False, health_reason="XID 79"), name="sick", **now)
    # Its memory would not do if it were healthy.
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
    names = ("sick", "late", "full", "small", "unknown")
    fleet = asked(
        *(NodeSeen(kube_node(each)) for each in names),
        GPUNodeSeen(late, 0.0),
    )
    fleet.now_s = 100.0
    fleet.cluster.apply([GPUNodeSeen(each, 100.0) for each in (sick, full, small, unknown)])
    body = explained(fleet)
    repairs = {one["node"]: one["sentence"] for one in body["advice"] if one["kind"] == "repair"}  # type: ignore[attr-defined]
    assert repairs == {
        "late": "repair node late: the pod would fit there, but GPU report of the node is stale "
        "(not checked: CPU, memory and other resources)",
        "sick": "repair node sick: the pod would fit there, but a GPU that the pod could get is "
        "unhealthy (S: XID 79) (not checked: CPU, memory and other resources)",
    }


def test_memory_without_replicas_wants_more_replicas() -> None:
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
        "wait_for": None,
    }


def test_a_pod_that_fits_needs_no_advice() -> None:
    body = explained(asked(*node("a")))
    assert (body["verdict"], kinds(body)) == ("fits", [])


def test_attempts_of_kube_scheduler_are_shown() -> None:
    fleet = asked(*node("a", whole=20), *node("b", full=20), *node("c", more=20))
    never = explained(fleet)["attempts"]
    assert isinstance(never, dict)
    assert (never["times"], never["offered_nodes"], never["again_by"]) == (0, None, None)
    assert never["message"].startswith("its scheduler has not called Headroom for this pod")
    which = decision_id(WAITS.metadata.uid, WAITS.metadata.resource_version)
    rejected = {Reason.MEMORY_ON_ANY: 2}
    at_s = datetime.fromisoformat(SINCE).timestamp()
    fleet.journal.record(Decision(WAITS, which, at_s, 7, offered=2, fits=0, rejected=rejected))
    tried = explained(fleet)["attempts"]
    assert isinstance(tried, dict)
    assert (tried["times"], tried["offered_nodes"], tried["not_offered_nodes"]) == (1, 2, 1)
    again = datetime.fromisoformat(tried["again_by"])
    assert again - datetime.fromisoformat(SINCE) == timedelta(minutes=5)
    assert "1 node did not pass kube-scheduler's own checks" in tried["message"]


@pytest.mark.parametrize("path", ["/v1/score?pod=default/waits&node=a"])
def test_a_score_names_them_too(path: str) -> None:
    body = asked(*node("a", tiny=2, small=9)).get(path).json()
    assert [held["name"] for held in body["live"]["node"]["blockers"]] == ["small", "tiny"]


def closed(name: str, **spec: object) -> NodeSeen:
    """The Node of that name with this spec: taints, or a cordon."""
    wire = {"metadata": {"name": name, "labels": {"zone": name}}, "spec": spec}
    return NodeSeen(msgspec.convert(wire, Node))


TEAM = {"key": "team", "value": "x", "effect": "NoSchedule"}


def waiting_with(**spec: object) -> Pod:
    """The pod that waits, with more in its spec."""
    wire = msgspec.to_builtins(WAITS)
    wire["spec"] |= spec
    return msgspec.convert(wire, Pod)


def record(
    fleet: Asked, *offered: str, waits: Pod = WAITS, at_s: float = WALL_S
) -> dict[str, object]:
    """kube-scheduler asks about these nodes, and none takes the pod."""
    snap = fleet.cluster.snapshot()
    rows = np.array([snap.row_of[name] for name in offered], np.int64)
    nodes = NodeSets().offered(snap.row_of, rows)
    which = decision_id(waits.metadata.uid, waits.metadata.resource_version)
    rejected = {Reason.MEMORY_ON_ANY: len(offered)}
    decision = Decision(waits, which, at_s, 7, len(offered), 0, rejected, offered_nodes=nodes)
    fleet.journal.record(decision)
    return explained(fleet)


@pytest.mark.parametrize(
    ("spec", "what", "advice"),
    [
        pytest.param(
            {"unschedulable": True},
            "cordoned",
            "uncordon: the pod would fit on node b",
            id="cordon",
        ),
        pytest.param(
            {"taints": [TEAM]},
            "taint team=x:NoSchedule, which the pod does not tolerate",
            "add a toleration for taint team=x:NoSchedule: the pod would fit on node b",
            id="taint",
        ),
    ],
)
def test_a_node_that_kube_scheduler_left_out_does_not_count_as_fitting(
    spec: dict[str, object], what: str, advice: str
) -> None:
    body = explained(asked(*node("a", whole=20), *node("b"), closed("b", **spec)))
    assert (body["verdict"], body["fits"]) == ("rejected", 0)
    assert body["message"] == "no node can take the pod"
    (kept_out,) = body["ineligible"]  # type: ignore[misc]
    assert (kept_out["message"], kept_out["nodes"]) == (what, 1)
    assert kinds(body) == ["lower", "wait", "eligible"]
    assert str(body["suggestions"][-1]).startswith(advice)  # type: ignore[index]
    assert [each["node"] for each in body["nearest"]] == ["a"]  # type: ignore[attr-defined]


def test_advice_to_lower_is_of_the_nodes_that_the_pod_selects() -> None:
    waits = waiting_with(nodeSelector={"zone": "b"})
    fleet = asked(*node("a", some=12), *node("b", most=20), closed("a"), closed("b"), waits=waits)
    body = explained(fleet)
    lower = body["advice"][0]  # type: ignore[index]
    assert lower["lower_to_bytes"] == 4 * GIB  # and not 12, as on a
    obstacle = body["ineligible"][0]  # type: ignore[index]
    assert obstacle["message"] == "labels do not match the pod's nodeSelector zone=b"


def test_two_obstacles_are_not_advised_away_as_if_they_were_one() -> None:
    waits = waiting_with(nodeSelector={"zone": "a"})
    fleet = asked(
        *node("a", whole=24), *node("b"), closed("a"), closed("b", taints=[TEAM]), waits=waits
    )
    assert "eligible" not in kinds(explained(fleet))


def test_without_an_eligible_node_the_first_cause_is_in_the_headline() -> None:
    body = explained(asked(*node("a"), closed("a", unschedulable=True)))
    assert body["message"] == "no node is eligible: 1 node: cordoned"


def test_the_nodes_of_the_last_filter_call_are_those_that_are_explained() -> None:
    fleet = asked(*node("a", some=12), *node("b", most=20))
    body = record(fleet, "b")
    assert (body["left_out_nodes"], body["not_checked"]) == (1, [])
    assert [each["node"] for each in body["nearest"]] == ["b"]  # type: ignore[attr-defined]
    assert body["suggestions"][0] == (  # type: ignore[index]
        "lower headroom.gpu/vram to 4Gi or less: that fits now"
    )
    assert body["last_decision"]["filter"]["offered_nodes"] is None  # type: ignore[index]
    names = fleet.get("/v1/decisions?offered_nodes=true").json()["decisions"]
    assert names[0]["filter"]["offered_nodes"] == ["b"]


def test_without_a_filter_call_missing_checks_are_listed() -> None:
    spread = [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]
    waits = waiting_with(
        topologySpreadConstraints=spread,
        volumes=[{"persistentVolumeClaim": {"claimName": "data"}}],
    )
    fleet = asked(*node("a"), waits=waits)
    body = explained(fleet)
    unchecked = "CPU, memory and other resources, volumes, topology spread constraints"
    assert body["message"] == f"1 node has GPU memory for the pod (not checked: {unchecked})"
    full = asked(*node("a", whole=20), waits=waits)
    after = record(full, "a", waits=waits)
    assert after["suggestions"][0] == (  # type: ignore[index]
        "lower headroom.gpu/vram to 4Gi or less: that much is free now (not checked: volumes, "
        "topology spread constraints)"
    )


def test_a_scheduling_gate_and_another_scheduler_are_named() -> None:
    gated = explained(asked(*node("a"), waits=waiting_with(schedulingGates=[{"name": "queue"}])))
    assert (gated["verdict"], gated["message"]) == (
        "gated",
        "the pod has 1 scheduling gate (queue): no scheduler tries it until it is removed",
    )
    other = explained(asked(*node("a"), waits=waiting_with(schedulerName="volcano")))
    assert (other["verdict"], other["message"]) == (
        "other_scheduler",
        "spec.schedulerName is volcano, which is not known to call Headroom; create the pod "
        "again with spec.schedulerName: default-scheduler",
    )


def test_a_request_larger_than_every_device_has_its_own_message() -> None:
    body = explained(asked(*node("a", some=4), waits=pod("25Gi", uid="uw", name="waits")))
    assert body["message"] == (
        "no node can take the pod: it needs 25.0 GiB, larger than any GPU that it may use "
        "(24.0 GiB)"
    )


def test_equal_devices_are_one_line() -> None:
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


def test_a_cordoned_node_shows_at_once_though_no_snapshot_changes() -> None:
    fleet = asked(*node("a"))
    before = fleet.get("/v1/nodes")
    fleet.cluster.apply([closed("a", unschedulable=True, taints=[TEAM])])
    after = fleet.get("/v1/nodes", {"If-None-Match": before.headers["ETag"]})
    (shown,) = after.json()["nodes"]
    assert (shown["cordoned"], shown["taints"]) == (True, ["team=x:NoSchedule"])


def test_pending_pods_are_listed_with_the_same_reasons() -> None:
    fleet = asked(*node("a", whole=20), *node("b"), closed("b", unschedulable=True))
    (listed,) = fleet.get("/v1/pending").json()["pods"]
    body = explained(fleet)
    assert (listed["fits"], listed["message"]) == (0, body["message"])
    assert (listed["ineligible"], listed["nearest"]) == (body["ineligible"], "a")


def test_a_score_on_a_node_that_is_not_eligible_has_no_rank() -> None:
    fleet = asked(*node("a"), *node("b"), closed("b", taints=[TEAM]))
    live = fleet.get("/v1/score?pod=default/waits&node=b").json()["live"]
    assert (live["eligible"], live["fits"], live["rank"], live["wins"]) == (False, 1, None, False)
    assert [each["reason"] for each in live["failing"]] == ["taint"]
    there = fleet.get("/v1/score?pod=default/waits&node=a").json()["live"]
    assert (there["eligible"], there["fits"], there["rank"], there["wins"]) == (True, 1, 1, True)


def test_the_decisions_about_an_earlier_pod_of_the_name_are_not_about_this_one() -> None:
    earlier = pod("16Gi", uid="u-earlier", name="waits")
    fleet = asked(*node("a", whole=20), waits=waiting_with(schedulerName="volcano"))
    body = record(fleet, "a", waits=earlier)
    assert (body["verdict"], body["last_decision"]) == ("other_scheduler", None)


def quota(hard: str, used: str, resource: str = "requests.nvidia.com/gpu") -> ResourceQuota:
    status = QuotaStatus(hard={resource: hard}, used={resource: used})
    return ResourceQuota(metadata=ObjectMeta(name="team"), status=status)


@pytest.mark.parametrize(
    ("quotas", "first"),
    [
        pytest.param([], "lower headroom.gpu/vram to 4Gi or less", id="none"),
        pytest.param(
            [quota("2", "2")], "lower headroom.gpu/vram to 4Gi or less", id="just used up"
        ),
        pytest.param(
            [quota("1", "2")],
            "raise the quota before you change the pod: ResourceQuota team is exceeded for "
            "requests.nvidia.com/gpu; a pod that is deleted and created again could be rejected",
            id="lowered",
        ),
        pytest.param([quota("300m", "400m", "requests.cpu")], "raise the quota", id="thousandths"),
        pytest.param([quota("1", "2", "services")], "lower headroom.gpu/vram", id="of no pod"),
    ],
)
def test_nothing_that_a_quota_would_reject_is_suggested(
    quotas: list[ResourceQuota], first: str
) -> None:
    fleet = Asked(quotas=lambda namespace: quotas)
    fleet.cluster.apply([*node("a", some=20), PodSeen(WAITS)])
    suggestions = explained(fleet)["suggestions"]
    assert isinstance(suggestions, list)
    lowering = [each for each in suggestions if not each.startswith("wait ")]
    assert [each[: len(first)] for each in lowering] == [first]


def test_quotas_that_cannot_be_read_are_not_checked() -> None:
    fleet = Asked(quotas=lambda namespace: None)
    fleet.cluster.apply([*node("a", some=20), PodSeen(WAITS)])
    body = explained(fleet)
    assert "not checked: ResourceQuotas" in body["suggestions"][0]  # type: ignore[index]


def test_waiting_helps_on_a_node_without_an_agent() -> None:
    """No agent confirms there that a pod has ended, and its reservation is removed all the same."""
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
    fleet = Asked(cluster=ClusterWriter(rules, STALE_AFTER_S, epoch_s=WALL_S))
    fleet.cluster.apply(
        [NodeSeen(labelled), PodSeen(holder), ledger("1", reserved), PodSeen(WAITS)]
    )
    body = explained(fleet)
    (wait,) = (one for one in body["advice"] if one["kind"] == "wait")  # type: ignore[attr-defined]
    assert wait["wait_for"]["name"] == "holder"

    succeeded = msgspec.structs.replace(holder, status=PodStatus(phase="Succeeded"))
    fleet.cluster.apply([PodSeen(succeeded)])
    assert orphans(fleet.cluster, WALL_S, 60.0) == [Orphan("n", "u-holder")]
    fleet.cluster.apply([ledger("2", {})])
    assert explained(fleet)["verdict"] == "fits"

    # A pod that was deleted while no watch ran: the kubelet has ended it after 2 minutes.
    fleet.cluster.apply(
        [PodSeen(holder), ledger("3", reserved), PodGone("u-holder", is_last=False)]
    )
    (gone,) = orphans(fleet.cluster, WALL_S + fleet.now_s, 60.0)
    assert isinstance(gone, Unmarked)
    fleet.cluster.apply([DepartureMarked("n", "u-holder", "", fleet.now_s)])
    later_s = WALL_S + fleet.now_s + 121.0
    assert orphans(fleet.cluster, later_s, 60.0) == [Orphan("n", "u-holder", left=True)]


@pytest.mark.parametrize("permitted", [True, False, None])
def test_a_node_is_suggested_for_steering_if_the_plugins_choice_alone_rejects_the_pod(
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
    assert kinds(body) == ["lower", "steer"]
    # Following the suggestion makes the pod fit.
    steered = msgspec.structs.replace(plugin, steered=[GPU])
    fleet.cluster.apply(
        [
            NodeSeen(kube_node("a", {DEVICE_CHOICE: "steered"})),
            GPUNodeSeen(gpunode(*devices, name="a", version="2", plugin=steered), 0.0),
        ]
    )
    assert explained(fleet)["verdict"] == "fits"


def test_the_list_of_pending_pods_has_what_steering_would_place() -> None:
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


def test_a_pod_that_starts_alone_is_told_for_which_pod_it_waits() -> None:
    """Node a has memory for it; node b has not."""
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
        body["suggestions"][-1]
        == (  # type: ignore[index]
            "wait for pod default/loads, which is starting on node a since "
            f"{SINCE[:19]}Z: when it has started, the pod fits"
            " (not checked: CPU, memory and other resources)"
        )
    )
