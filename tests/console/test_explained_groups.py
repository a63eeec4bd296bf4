"""Checks that the explanation of each pod in a group covers the whole group."""

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from headroom.console.metrics import FleetCollector
from headroom.contract.kube import Pod, SchedulingGate, SchedulingGroup
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodGone, PodSeen
from headroom.core.placement.request import VramRequest
from headroom.core.whatif.pending_pods import Pending
from headroom.kubectl.why import why
from tests.builders import GIB, gpunode, kube_node, pod, reservation, shared
from tests.console.asking import Asked


def member(name: str, vram: str = "12Gi", node: str | None = None, group: str = "train") -> Pod:
    made = pod(vram, uid=name, name=name, node=node)
    spec = replace(made.spec, scheduling_group=SchedulingGroup(pod_group_name=group))
    return replace(made, spec=spec)


@pytest.fixture
def fleet() -> Asked:
    """A cluster in which three pods of the group are bound on two 24 GiB devices, and five pods
    wait. A third device is free.
    """
    fleet = Asked()
    for name, uids in (("a", ["p0", "p1"]), ("b", ["p2"]), ("c", [])):
        held = {uid: reservation({name: 12 * GIB}, name=uid) for uid in uids}
        device = shared(name, memory_bytes=24 * GIB)
        report = gpunode(device, name=name, uid=f"gn-{name}", reservations=held)
        fleet.writer.apply([NodeSeen(kube_node(name)), GPUNodeSeen(report, 0.0)])
        fleet.writer.apply([PodSeen(member(uid, node=name)) for uid in uids])
    fleet.writer.apply([PodSeen(member(f"p{i}")) for i in range(3, 8)])
    fleet.writer.apply([PodSeen(member("q0", "4Gi", group="other")), PodSeen(pod(name="alone"))])
    return fleet


def explained(fleet: Asked, name: str) -> str | None:
    body = fleet.get(f"/v1/explain?pod=default/{name}").json()
    group: str | None = body["group"]
    assert (f"  {group}" in why(body)) == (group is not None)
    return group


def test_a_partly_bound_group_reports_what_it_waits_for_and_where_that_fits(
    fleet: Asked,
) -> None:
    part = "3 of 8 pods of group train are bound, waiting for 5 x 12Gi; "
    for name in ("p0", "p7"):
        assert explained(fleet, name) == part + "3 of the first 5 would fit on c, b"
    fleet.writer.apply([PodGone("p6"), PodGone("p7")])
    assert explained(fleet, "p0") == (
        "3 of 6 pods of group train are bound, waiting for 3 x 12Gi; all would fit on c, b"
    )
    fleet.writer.apply([PodGone(f"p{i}") for i in range(3, 6)])
    assert explained(fleet, "p0") == "3 of 3 pods of group train are bound"


def test_the_overview_lists_a_group_as_one_entry(fleet: Asked) -> None:
    """The pods of a group can differ, and need no common controller."""
    fleet.writer.apply([PodSeen(member("q1", "80Gi", group="other"))])
    listed = {each["owner_name"]: each for each in fleet.get("/v1/overview").json()["waiting"]}
    assert listed.keys() == {"train", "other", "alone"}
    train, other = listed["train"], listed["other"]
    assert (train["owner_kind"], train["pods"], train["name"]) == ("PodGroup", 5, "p3")
    assert train["request"] == "1 x nvidia.com/gpu with 12Gi"
    assert train["verdict"] == "rejected"
    assert train["message"] == explained(fleet, "p3")
    assert (other["pods"], other["request"], other["verdict"]) == (2, "", "rejected")
    fleet.writer.apply([PodGone(f"p{i}") for i in range(6, 8)])
    fleet.writer.apply([PodGone("q1")])
    fleet.now_s += 60
    listed = {each["owner_name"]: each for each in fleet.get("/v1/overview").json()["waiting"]}
    assert {name: listed[name]["verdict"] for name in ("train", "other")} == {
        "train": "fits",
        "other": "fits",
    }
    gated = member("q2", group="other")
    gates = [SchedulingGate("later")]
    fleet.writer.apply([PodSeen(replace(gated, spec=replace(gated.spec, scheduling_gates=gates)))])
    fleet.now_s += 60
    waiting = fleet.get("/v1/overview").json()["waiting"]
    verdicts = sorted(each["verdict"] for each in waiting if each["owner_name"] == "other")
    assert verdicts == ["gated", "rejected"]  # Not all pods of the group fit.


def test_the_list_of_pending_pods_shows_the_group_of_each_pod(fleet: Asked) -> None:
    pods = {each["name"]: each for each in fleet.get("/v1/pending").json()["pods"]}
    part = "3 of 8 pods of group train are bound, waiting for 5 x 12Gi"
    assert pods["alone"]["group"] is None
    assert (
        pods["p3"]["group"]
        == pods["p7"]["group"]
        == {
            "name": "train",
            "waiting": 5,
            "requests": "5 x 12Gi",
            "message": f"{part}; 3 of the first 5 would fit on c, b",
        }
    )
    assert [each["name"] for each in pods.values() if each["group"]] == [
        *(f"p{i}" for i in range(3, 8)),
        "q0",
    ]


def test_a_long_list_searches_nodes_only_for_the_first_pods(
    fleet: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headroom.console.views.pending.MOST_PLACED", 2)
    pods = {each["name"]: each for each in fleet.get("/v1/pending").json()["pods"]}
    assert pods["p3"]["group"]["message"] == (
        "3 of 8 pods of group train are bound, waiting for 5 x 12Gi; "
        "2 of the first 2 would fit on b, c"
    )
    assert pods["q0"]["group"]["message"] == (
        "0 of 1 pods of group other are bound, waiting for 1 x 4Gi"
    )


def test_pods_of_different_sizes_are_counted_separately(fleet: Asked) -> None:
    fleet.writer.apply([PodSeen(member("q1", "80Gi", group="other"))])
    assert explained(fleet, "q1") == (
        "0 of 2 pods of group other are bound, waiting for 1 x 4Gi, 1 x 80Gi; "
        "1 of the first 2 would fit on b"
    )
    fleet.writer.apply([PodGone("q0")])
    assert explained(fleet, "q1") == (
        "0 of 1 pods of group other are bound, waiting for 1 x 80Gi; none of them fits now"
    )


def test_memory_that_is_held_for_the_group_counts_as_free_for_it(fleet: Asked) -> None:
    for name in ("p3", "p4"):
        waiting = fleet.cluster.pod(name)
        assert waiting is not None
        request = fleet.cluster.understand(waiting)
        assert isinstance(request, VramRequest)
        fleet.writer.parts.calls.assumed.assume(waiting, request, "c", 0.0)
    sentence = explained(fleet, "p7")
    assert sentence is not None
    assert sentence.endswith("3 of the first 5 would fit on c, b")


def test_the_metric_counts_only_partly_bound_groups(fleet: Asked) -> None:
    """Groups without bound pods and completely bound groups do not count."""
    cluster, registry = fleet.cluster, CollectorRegistry()
    registry.register(FleetCollector(cluster, cluster.snapshot, Pending, 10, 90.0))

    def count() -> float | None:
        return registry.get_sample_value("headroom_groups_partly_bound")

    assert count() == 1
    fleet.writer.apply([PodGone(f"p{i}") for i in range(3, 8)])
    assert count() == 0


def test_a_group_of_kueue_is_also_shown(fleet: Asked) -> None:
    made = pod("12Gi", uid="k0", name="k0")
    labels = {"kueue.x-k8s.io/pod-group-name": "batch"}
    fleet.writer.apply([PodSeen(replace(made, metadata=replace(made.metadata, labels=labels)))])
    assert explained(fleet, "k0") == (
        "0 of 1 pods of group batch are bound, waiting for 1 x 12Gi; all would fit on b"
    )


def test_a_single_pod_shows_no_group(fleet: Asked) -> None:
    assert explained(fleet, "alone") is None
