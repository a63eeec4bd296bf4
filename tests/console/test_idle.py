"""Tests /v1/idle, which lists pods that hold GPU memory without SM activity, and their costs."""

from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from headroom.console.metrics import FleetCollector
from headroom.contract.gpunode import Device, Replicas, SmActivity
from headroom.contract.kube import OwnerReference, Pod
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.cluster.idle_pods import idle_pods
from headroom.core.whatif.pending_pods import Pending
from headroom.runtime.server.auth import GetPod, ReadPath
from tests.builders import GIB, device, gpunode, kube_node, mig, pod, reservation, shared, use
from tests.console.asking import STALE_AFTER_S, Asked
from tests.server.test_auth import GuardedApi

#: ``TWO_DAYS`` is two days and ``AN_HOUR`` one hour before the reports.
TWO_DAYS, AN_HOUR = "2026-11-19T00:00:00Z", "2026-11-20T23:00:00Z"
SM = SmActivity(0.0, "gpm")


def owned(of: Pod, kind: str, name: str, **labels: str) -> Pod:
    owner = OwnerReference("apps/v1", kind, name, controller=True)
    metadata = msgspec.structs.replace(of.metadata, owner_references=[owner], labels=labels)
    return msgspec.structs.replace(of, metadata=metadata)


def fleet(*devices: Device, rows: list[Any], held: dict[str, dict[str, int]]) -> Asked:
    """Return a cluster with a node that has these devices. ``held`` maps pods to the GiB that they
    hold on each device.
    """
    asked = Asked()
    add(asked, *devices, rows=rows, held=held)
    return asked


def add(asked: Asked, *devices: Device, rows: list[Any], held: dict[str, dict[str, int]]) -> None:
    reservations = {
        f"u-{name}": msgspec.structs.replace(
            reservation({uuid: gib * GIB for uuid, gib in on.items()}, name=name), namespace="ml"
        )
        for name, on in held.items()
    }
    node = gpunode(*devices, name="n", reservations=reservations, pods=rows)
    pods = [pod("1Gi", uid=f"u-{n}", name=n, namespace="ml", node="n") for n in held]
    asked.writer.apply(
        [NodeSeen(kube_node("n")), *map(PodSeen, pods), GPUNodeSeen(node, asked.now_s)]
    )


def row(name: str, on: str, gib: int, since: str = "", **more: Any) -> Any:
    more = {"namespace": "ml", "name": name, "replica": f"{on}::{name}", **more}
    return use(f"u-{name}", on, gib * GIB, idle_since=since, **more)


@pytest.fixture
def team() -> Asked:
    """A shared 24 GiB GPU with a notebook that has been idle for two days, a server that has been
    idle for an hour, and an active trainer.
    """
    return fleet(
        shared("A", free=1, allocated=3, sm_activity=SM),
        rows=[
            row("notebook", "A", 4, TWO_DAYS),
            row("server", "A", 1, AN_HOUR),
            row("trainer", "A", 8),
        ],
        held={"notebook": {"A": 12}, "server": {"A": 6}, "trainer": {"A": 6}},
    )


def test_idle_pods_are_listed_with_the_memory_that_they_hold(team: Asked) -> None:
    body = team.get("/v1/idle?hours=0").json()
    first, second = body["pods"]
    assert first | {"uid": "", "node": ""} == {
        "namespace": "ml",
        "name": "notebook",
        "uid": "",
        "node": "",
        "device": "A",
        "owner_kind": None,
        "owner_name": None,
        "used_bytes": 4 * GIB,
        "reserved_bytes": 12 * GIB,
        "held_bytes": 12 * GIB,
        "gpu_ratio": 0.5,
        "idle_since": TWO_DAYS,
        "idle_s": 172_800.0,
        "gpu_days": 1.0,
        "cost": None,
    }
    # The server holds a quarter of the memory and a quarter of the replicas.
    assert (second["name"], second["gpu_ratio"], second["idle_s"]) == ("server", 0.25, 3600.0)
    assert body["teams"] == [
        {
            "namespace": "ml",
            "pods": 2,
            "held_bytes": 18 * GIB,
            "gpus_ratio": 0.75,
            "gpu_days": 1.0104,
            "cost": None,
        }
    ]
    assert (body["after_s"], body["least_held_bytes"]) == (0.0, GIB)


@pytest.mark.parametrize(
    ("query", "names"),
    [
        pytest.param("", ["notebook", "server"], id="an hour by default"),
        pytest.param("?hours=1.001", ["notebook"], id="longer"),
        pytest.param("?hours=49", [], id="too long"),
        pytest.param("?held=6Gi", ["notebook", "server"], id="holds exactly the minimum"),
        pytest.param("?held=6.1Gi", ["notebook"], id="holds less than the minimum"),
        pytest.param("?namespace=ml", ["notebook", "server"], id="its namespace"),
        pytest.param("?namespace=other", [], id="another namespace"),
    ],
)
def test_the_list_is_limited_in_length(team: Asked, query: str, names: list[str]) -> None:
    body = team.get(f"/v1/idle{query}").json()
    assert [each["name"] for each in body["pods"]] == names
    assert sum(each["pods"] for each in body["teams"]) == len(names)


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("held=much", "query held: 'much' is not a quantity"),
        ("hours=-1", "'-1' is less than 0, the minimum"),
    ],
)
def test_invalid_queries_are_rejected(team: Asked, query: str, says: str) -> None:
    answer = team.get(f"/v1/idle?{query}")
    assert answer.status_code == 422
    assert says in answer.text


def test_costs_are_shown_with_a_price(team: Asked) -> None:
    object.__setattr__(team.context, "gpu_hour_price", lambda: 2.5)
    body = team.get("/v1/idle").json()
    assert body["gpu_hour_price"] == 2.5
    # 24 hours, and a quarter of one hour
    assert [each["cost"] for each in body["pods"]] == [60.0, 0.62]
    assert body["teams"][0]["cost"] == 60.62


def test_owners_are_controllers_and_deployments_for_replica_sets() -> None:
    asked = fleet(
        shared("A", free=0, allocated=4, sm_activity=SM),
        rows=[row(name, "A", 2, TWO_DAYS) for name in ("a-7f9c-x", "a-7f9c-y", "job-1", "alone")],
        held={name: {"A": 2} for name in ("a-7f9c-x", "a-7f9c-y", "job-1", "alone")},
    )
    hashed = {"pod-template-hash": "7f9c"}
    for name in ("a-7f9c-x", "a-7f9c-y"):
        each = asked.cluster.pod(f"u-{name}")
        assert each is not None
        asked.writer.apply([PodSeen(owned(each, "ReplicaSet", "a-7f9c", **hashed))])
    job = asked.cluster.pod("u-job-1")
    assert job is not None
    asked.writer.apply([PodSeen(owned(job, "Job", "job"))])
    owners = asked.get("/v1/idle").json()["owners"]
    assert [(each["kind"], each["name"], each["pods"]) for each in owners] == [
        ("Deployment", "a", 2),
        ("Pod", "alone", 1),
        ("Job", "job", 1),
    ]


def test_a_whole_gpu_is_held_even_if_little_of_it_is_requested() -> None:
    asked = fleet(
        device("A", replicas=Replicas(allocated=1), sm_activity=SM),
        rows=[row("p", "A", 1, TWO_DAYS)],
        held={"p": {"A": 2}},
    )
    (each,) = asked.get("/v1/idle").json()["pods"]
    assert (each["gpu_ratio"], each["gpu_days"]) == (1.0, 2.0)


def test_a_mig_device_counts_as_part_of_its_gpu() -> None:
    asked = fleet(
        mig("M1", 1, replicas=Replicas(allocated=1), sm_activity=SM),
        mig("M2", 2, memory_bytes=30 * GIB, sm_activity=SM),
        rows=[row("p", "M1", 10, TWO_DAYS)],
        held={"p": {"M1": 10}},
    )
    (each,) = asked.get("/v1/idle").json()["pods"]
    assert each["gpu_ratio"] == 0.25


def test_pods_of_stale_reports_are_not_listed(team: Asked) -> None:
    """The pods may be active by now."""
    team.now_s = STALE_AFTER_S + 1
    assert team.get("/v1/idle").json()["pods"] == []
    assert team.get("/v1/idle?pod=ml/notebook").status_code == 404


def test_devices_without_sm_activity_are_counted() -> None:
    asked = fleet(shared("A"), shared("B", sm_activity=SM), rows=[], held={})
    assert asked.get("/v1/idle").json()["devices_without_sm_activity"] == 1


@pytest.mark.parametrize(
    ("name", "query", "idle"),
    [
        pytest.param("notebook", "", True, id="for two days"),
        pytest.param("server", "", True, id="for an hour"),
        pytest.param("server", "&hours=2", False, id="not for two hours"),
        pytest.param("trainer", "", False, id="active"),
    ],
)
def test_the_list_can_be_limited_to_one_pod(team: Asked, name: str, query: str, idle: bool) -> None:
    body = team.get(f"/v1/idle?pod=ml/{name}{query}").json()
    assert body["idle"] is idle
    since = {"notebook": TWO_DAYS, "server": AN_HOUR}.get(name)
    assert (body["idle_since"], body["devices"]) == (since, ["A"])
    assert (body["idle_s"] is None) == (since is None)


def test_a_pod_is_idle_only_if_all_its_devices_are_known_to_be_idle() -> None:
    asked = Asked()
    rows = [row("p", "A", 1, TWO_DAYS), row("p", "B", 1, AN_HOUR), row("q", "B", 1, TWO_DAYS)]
    held = {"p": {"A": 1, "B": 1}, "q": {"B": 1, "C": 1}}
    devices = shared("A", sm_activity=SM), shared("B", sm_activity=SM), shared("C")
    add(asked, *devices, rows=[*rows, row("q", "C", 1)], held=held)
    both = asked.get("/v1/idle?pod=ml/p").json()
    assert (both["idle"], both["idle_since"], both["held_bytes"]) == (True, AN_HOUR, 2 * GIB)
    unknown = asked.get("/v1/idle?pod=ml/q").json()
    assert (unknown["idle"], unknown["idle_since"]) == (None, None)
    add(asked, *devices, rows=[row("p", "A", 1, TWO_DAYS), row("p", "B", 1)], held=held)
    assert asked.get("/v1/idle?pod=ml/p").json()["idle"] is False


def test_a_pod_without_a_report_is_unknown(team: Asked) -> None:
    answer = team.get("/v1/idle?pod=ml/other")
    assert answer.status_code == 404
    assert "no fresh report of a node shows pod ml/other" in answer.text


def test_a_caller_that_may_get_a_pod_may_read_whether_it_is_idle() -> None:
    world = GuardedApi()
    add(
        world.api,
        shared("A", sm_activity=SM),
        rows=[row("p", "A", 1, TWO_DAYS)],
        held={"p": {"A": 1}},
    )
    world.reviews.rights["culler"] = {GetPod("ml", "p")}
    world.reviews.rights["viewer"] = {ReadPath("get", "/v1/idle")}
    assert world.get("/v1/idle?pod=ml/p", "culler").json()["idle"] is True
    assert world.get("/v1/idle?pod=ml/q", "culler").status_code == 403
    assert world.get("/v1/idle", "culler").status_code == 403
    assert world.get("/v1/idle", "viewer").json()["pods"][0]["name"] == "p"


def test_the_metric_has_the_idle_gpus_of_each_namespace(
    team: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", team.context.wall_s)
    monkeypatch.setattr("time.monotonic", team.context.monotonic_s)
    registry = CollectorRegistry()
    snapshot = team.cluster.snapshot()
    registry.register(FleetCollector(team.cluster, lambda: snapshot, Pending, 10, STALE_AFTER_S))
    labels = {"namespace": "ml"}
    assert registry.get_sample_value("headroom_idle_gpus", labels) == 0.75
    assert registry.get_sample_value("headroom_idle_held_bytes", labels) == 18 * GIB


def test_most_wasteful_pods_come_first() -> None:
    asked = fleet(
        shared("A", free=2, allocated=2, sm_activity=SM),
        rows=[row("a", "A", 4, AN_HOUR), row("z", "A", 1, TWO_DAYS)],
        held={"a": {"A": 6}, "z": {"A": 12}},
    )
    found = idle_pods(asked.cluster, asked.cluster.snapshot(), 0.0, asked.context.wall_s())
    assert [(each.name, round(each.gpu_s)) for each in found] == [("z", 86_400), ("a", 900)]
