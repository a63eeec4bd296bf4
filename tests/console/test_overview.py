"""Tests /v1/overview, which lists risks, pending pods and faults in order of urgency."""

from typing import Any

from msgspec.structs import replace

from headroom.console.history.growth import Growing
from headroom.console.views.process import SettingsView
from headroom.contract.gpunode import Device
from headroom.contract.kube import OwnerReference, Pod, SchedulingGate
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from tests.builders import DISTRIBUTED, GIB, gpunode, kube_node, pod, reservation, shared, use
from tests.console.asking import STALE_AFTER_S, Asked
from tests.console.test_idle import fleet, row


def read(asked: Asked, query: str = "") -> dict[str, Any]:
    answer = asked.get(f"/v1/overview{query}")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def add(asked: Asked, name: str, *devices: Device, held_gib: int = 0, used_gib: int = 0) -> None:
    """Add a node. On its first device is a pod with this reservation and use."""
    first, uid = devices[0].uuid, f"uid-{name}"
    reservations = {uid: reservation({first: held_gib * GIB}, name=f"p-{name}")} if held_gib else {}
    rows = (
        [use(uid, first, used_gib * GIB, namespace="default", name=f"p-{name}")] if held_gib else []
    )
    report = gpunode(*devices, name=name, reservations=reservations, pods=rows, plugin=DISTRIBUTED)
    bound = [PodSeen(pod("1Gi", uid=uid, name=f"p-{name}", node=name))] if held_gib else []
    asked.writer.apply([NodeSeen(kube_node(name)), *bound, GPUNodeSeen(report, asked.now_s)])


def of_job(of: Pod, created: str = "2026-11-20T23:00:00Z") -> Pod:
    owner = OwnerReference("batch/v1", "Job", "train", controller=True)
    metadata = replace(of.metadata, owner_references=[owner], creation_timestamp=created)
    return replace(of, metadata=metadata)


def test_without_entries_the_fleet_is_ok() -> None:
    asked = Asked()
    asked.add_node("a")
    body = read(asked)
    assert body["totals"] == {"at_risk": 0, "waiting": 0, "waiting_pods": 0, "broken": 0}
    assert (body["at_risk"], body["waiting"], body["broken"]) == ([], [], [])


def test_risks_are_ranked_by_kind_and_then_by_urgency() -> None:
    asked = Asked()
    add(asked, "fine", shared("F"), held_gib=4, used_gib=2)
    add(asked, "over", shared("O"), held_gib=4, used_gib=6)
    add(asked, "sick", shared("S", healthy=False, health_reason="XID 79"), held_gib=4, used_gib=2)
    add(asked, "late", shared("L"), held_gib=4, used_gib=2)
    add(asked, "soon", shared("N"), held_gib=4, used_gib=2)
    outside = shared("C", used_bytes=22 * GIB, unattributed_bytes=20 * GIB)
    add(asked, "full", outside, held_gib=12, used_gib=2)
    growing = {
        "late": (Growing("L", 1e6, 3000.0, "default", "p-late"),),
        "soon": (Growing("N", GIB / 3600, 90.0),),
    }
    object.__setattr__(asked.context, "growing", lambda: growing)
    asked.writer.parts.overuses.update(0.0)
    asked.writer.parts.overuses.update(1e6)
    found = [(each["kind"], each["node"]) for each in read(asked)["at_risk"]]
    assert found == [
        ("overcommitted", "full"),
        ("growing", "soon"),
        ("growing", "late"),
        ("unhealthy", "sick"),
        ("overuse", "over"),
    ]
    messages = {each["node"]: each["message"] for each in read(asked)["at_risk"]}
    assert messages["full"] == (
        "31.9 GiB are reserved or used of 24.0 GiB: 7.9 GiB too much; processes of no known pod "
        "use 20.0 GiB"
    )
    assert messages["soon"] == "grows by 1.0 GiB an hour: full in 2 minutes"
    assert messages["sick"] == "unhealthy: XID 79; its pods may fail"
    assert messages["over"] == "default/p-over uses 6.0 GiB and requested 4.0 GiB"
    first = read(asked, "?limit=1")
    assert [each["node"] for each in first["at_risk"]] == ["full"]
    assert first["totals"]["at_risk"] == 5
    # The view of each device has the same entry.
    for risk in read(asked)["at_risk"]:
        path = f"/v1/nodes/{risk['node']}/devices/{risk['device']}"
        assert asked.get(path).json()["risk"] == risk
    assert asked.get("/v1/nodes/fine/devices/F").json()["risk"] is None
    pods = {each["node"]: each["pods"] for each in read(asked)["at_risk"]}
    assert pods["late"] == [{"namespace": "default", "name": "p-late"}]


def test_a_pod_whose_use_overcommits_a_gpu_is_listed() -> None:
    asked = fleet(
        shared("A", free=2, allocated=2, used_bytes=20 * GIB),
        rows=[row("train", "A", 14), row("chat", "A", 6)],
        held={"train": {"A": 10}, "chat": {"A": 12}},
    )
    asked.writer.parts.overuses.update(0.0)
    asked.writer.parts.overuses.update(1e6)
    (risk,) = read(asked)["at_risk"]
    assert risk["kind"] == "overcommitted"
    assert risk["message"] == (
        "26.0 GiB are reserved or used of 24.0 GiB: 2.0 GiB too much; "
        "ml/train uses 14.0 GiB and requested 10.0 GiB"
    )


def test_pending_pods_of_one_owner_with_equal_requests_are_one_group() -> None:
    asked = Asked()
    asked.add_node("a")
    pods = [
        *(of_job(pod("90Gi", uid=f"u-{number}", name=f"train-{number}")) for number in range(3)),
        of_job(pod("30Gi", uid="u-9", name="train-9"), "2026-11-20T22:00:00Z"),
    ]
    asked.writer.apply([PodSeen(each) for each in pods])
    body = read(asked)
    assert (body["totals"]["waiting"], body["totals"]["waiting_pods"]) == (2, 4)
    small, large = body["waiting"]
    assert (large["owner_kind"], large["owner_name"], large["pods"]) == ("Job", "train", 3)
    assert (large["request"], large["oldest_s"]) == ("1 x nvidia.com/gpu with 90Gi", 3600.0)
    assert (small["name"], small["pods"], small["oldest_s"]) == ("train-9", 1, 7200.0)


def test_pods_of_one_owner_with_different_causes_are_different_groups() -> None:
    asked = Asked()
    asked.add_node("a")
    rejected, gated, elsewhere = (of_job(pod("30Gi", uid=f"u-{n}", name=f"p-{n}")) for n in "abc")
    spec = rejected.spec
    gated = replace(gated, spec=replace(spec, scheduling_gates=[SchedulingGate("quota")]))
    elsewhere = replace(elsewhere, spec=replace(spec, scheduler_name="other"))
    asked.writer.apply([PodSeen(each) for each in (rejected, gated, elsewhere)])
    found = read(asked)["waiting"]
    assert [(each["name"], each["verdict"]) for each in found] == [
        ("p-a", "rejected"),
        ("p-b", "gated"),
        ("p-c", "other_scheduler"),
    ]


def test_each_group_has_its_cause_and_one_fix() -> None:
    asked = Asked()
    asked.add_node("a")
    asked.journal.asked_by(["default-scheduler"])
    asked.writer.apply([PodSeen(pod("30Gi", uid="u", name="large"))])
    (group,) = read(asked)["waiting"]
    assert group["verdict"] == "rejected"
    assert group["message"].endswith("1 node: insufficient GPU memory on any device")
    assert group["fix"] == (
        "if the program needs no more than 24Gi, lower headroom.gpu/vram to it: that much is free "
        "now (not checked: CPU, memory and other resources)"
    )


def test_explanations_are_shared_until_a_pod_is_added_or_some_seconds_have_passed() -> None:
    asked = Asked()
    asked.add_node("a")
    asked.writer.apply([PodSeen(pod("30Gi", uid="u", name="p", created=None))])
    first = read(asked)["waiting"][0]
    asked.now_s = 4.0
    assert read(asked)["waiting"][0] == first
    asked.writer.apply([PodSeen(pod("8Gi", uid="v", name="q"))])
    assert len(read(asked)["waiting"]) == 2


def test_explanations_that_waited_for_the_api_server_are_shared_for_at_most_30_s() -> None:
    def slow_quotas(namespace: str) -> None:
        asked.now_s += 3.0

    asked = Asked(quotas=slow_quotas)
    asked.add_node("a")
    asked.writer.apply([PodSeen(of_job(pod("30Gi", uid="u", name="p")))])
    first = read(asked)["waiting"][0]
    asked.now_s += 31.0
    assert read(asked)["waiting"][0]["oldest_s"] > first["oldest_s"]


def test_broken_nodes_devices_and_settings_have_a_fix() -> None:
    asked = Asked()
    for name in ("a", "b"):
        asked.add_node(name)
    asked.now_s = STALE_AFTER_S + 1
    add(asked, "c", shared("C", healthy=False, health_reason="XID 79"))
    add(asked, "d", shared("D", compute_mode="exclusive-process"))
    rejected = SettingsView(mode="enforce", file="f", rejected=["f:3: polcy"], after_restart=[])
    object.__setattr__(asked.context, "settings", lambda: rejected)
    object.__setattr__(asked.context, "unready", lambda: "no contact with the API server")
    settings, contact, nodes, device, closed = read(asked)["broken"]
    assert (contact["kind"], contact["message"]) == ("input", "no contact with the API server")
    assert contact["fix"].startswith("kubectl -n headroom-system logs ")
    assert settings["message"].endswith("the previous settings stay in use: f:3: polcy")
    assert nodes["message"] == "4 nodes: GPU report of the node is stale (a, b, c, ...)"
    assert nodes["fix"].endswith("--field-selector spec.nodeName=a")
    assert device["message"] == "GPU C of c is unhealthy: XID 79"
    assert device["fix"].startswith("kubectl headroom cordon c C --evict")
    assert closed["message"].startswith("GPU D of d takes no pods: its compute mode is exclusive")
    assert closed["fix"] == "on the node: nvidia-smi -i D -c DEFAULT"
    assert (device["kind"], device["node"], device["gpu"]) == ("device", "c", "C")
