"""Tests /v1/nodes/{name}/devices/{uuid}, which shows a device and its pods."""

from typing import Any

import msgspec
import pytest

from headroom.contract.gpunode import (
    ContainerLimit,
    Device,
    Replicas,
    Reservation,
    UnattributedProcess,
)
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from tests.builders import GIB, gpunode, kube_node, mig, pod, reservation, shared, use
from tests.console.asking import Asked

SINCE = "2026-11-20T23:00:00+00:00"


def since(reservation: Reservation) -> Reservation:
    return msgspec.structs.replace(reservation, since=SINCE)


@pytest.fixture
def fleet() -> Asked:
    """A cluster with GPU A, which has a running, a terminating, an unreserved, a deleted and an
    unconfirmed pod.
    """
    asked = Asked()
    names = ("runs", "ends", "gone", "comes")
    reservations = {f"u-{name}": since(reservation({"A": 2 * GIB}, name=name)) for name in names}
    rows = [
        use(f"u-{name}", "A", gib * GIB, replica=f"A::{n}", name=name, container="main")
        for n, (name, gib) in enumerate({"runs": 3, "ends": 1, "gone": 1, "strange": 4}.items())
    ]
    node = gpunode(
        shared(
            "A",
            free=3,
            allocated=4,
            used_bytes=10 * GIB,
            unattributed_bytes=GIB,
            healthy=False,
            health_reason="XID 79",
            unhealthy_since=SINCE,
            compute_mode="Default",
        ),
        shared("B", sharing="mps", replicas=Replicas(free=4)),
        mig("MIG-1", 3, resource="nvidia.com/mig-1g.10gb", unattributed_bytes=None),
        name="n",
        reservations=reservations,
        pods=rows,
    )
    assert node.status is not None
    status = msgspec.structs.replace(
        node.status,
        unattributed_processes=[
            UnattributedProcess("A", 4711, "python3", GIB),
            UnattributedProcess("B", 4712, "other"),
        ],
        limits=[ContainerLimit("u-runs", "A", "c1", container="main", hard_bytes=8 * GIB)],
    )
    node = msgspec.structs.replace(node, status=status)
    bound = {"node": "n", "phase": "Running"}
    asked.writer.apply(
        [
            NodeSeen(kube_node("n")),
            PodSeen(pod("2Gi", uid="u-runs", name="runs", priority=9, **bound)),
            PodSeen(pod("2Gi", uid="u-ends", name="ends", deleted=SINCE, **bound)),
            PodSeen(pod("2Gi", uid="u-comes", name="comes", node="n")),
            GPUNodeSeen(node, 0.0),
        ]
    )
    return asked


def test_every_pod_on_a_device_is_shown_with_its_phase(fleet: Asked) -> None:
    body = fleet.get("/v1/nodes/n/devices/A").json()
    shown = [
        (h["name"], h["phase"], h["reserved"], h["charged_bytes"] // GIB, h["exceeds_by_bytes"])
        for h in body["holders"]
    ]
    assert shown == [
        ("strange", "running", False, 4, 0),
        ("runs", "running", True, 3, GIB),
        ("comes", "unconfirmed", True, 2, 0),
        ("ends", "ending", True, 2, 0),
        ("gone", "gone", True, 2, 0),
    ]
    runs = body["holders"][1]
    assert (runs["since"], runs["priority"]) == ("2026-11-20T23:00:00Z", 9)
    assert runs["containers"][0]["replica"] == "A::0"
    assert body["unattributed_processes"] == [
        {"pid": 4711, "command": "python3", "used_bytes": GIB}
    ]
    assert body["health"] == {"healthy": False, "detail": "XID 79", "since": "2026-11-20T23:00:00Z"}
    assert (body["limits"][0]["hard_bytes"], body["limits"][0]["used_bytes"]) == (8 * GIB, None)
    assert body["device"]["unhealthy"] == "unhealthy_device"


def test_the_sharing_of_a_device_is_shown(fleet: Asked) -> None:
    mps = fleet.get("/v1/nodes/n/devices/B").json()
    assert (mps["mps_process_limit_bytes"], mps["replicas"]) == (6 * GIB, 4)
    instance = fleet.get("/v1/nodes/n/devices/MIG-1").json()
    assert (instance["mig_parent"], instance["mig_gpu_instance"]) == ("GPU-0", 3)
    assert instance["unattributed_processes"] is None  # unknown


def test_an_unknown_device_is_404_with_the_known_devices(fleet: Asked) -> None:
    for path, message in (
        ("/v1/nodes/n/devices/Z", "node n has no device Z; it reports: A, B, MIG-1"),
        ("/v1/nodes/m/devices/A", "node m is not known; GET /v1/nodes lists the known nodes"),
    ):
        answer = fleet.get(path)
        assert (answer.status_code, answer.json()["detail"]) == (404, message)


def capped(
    *devices: Device, share: str | None = None, **limits: int | None
) -> list[dict[str, Any]]:
    """Return the memory caps of a pod whose containers a and b hold these devices.

    ``limits`` maps containers to the hard limits that the agent reports.
    """
    asked = Asked()
    uid = "u"
    holders = [use(uid, each.uuid, GIB, container=name) for each in devices for name in ("a", "b")]
    node = gpunode(*devices, name="n", pods=holders)
    assert node.status is not None
    rows = [
        ContainerLimit(uid, devices[0].uuid, name, container=name, used_bytes=1, hard_bytes=hard)
        for name, hard in limits.items()
    ]
    node = msgspec.structs.replace(node, status=msgspec.structs.replace(node.status, limits=rows))
    annotations = {} if share is None else {"headroom.gpu/share": share}
    bound = pod("4Gi", uid=uid, name="p", node="n", phase="Running", annotations=annotations)
    asked.writer.apply([NodeSeen(kube_node("n")), PodSeen(bound), GPUNodeSeen(node, 0.0)])
    explained = asked.get("/v1/explain?pod=default/p").json()["caps"]
    body = asked.get(f"/v1/nodes/n/devices/{devices[0].uuid}").json()
    assert [holder["cap"] for holder in body["holders"]] == explained[:1]
    (listed,) = asked.get("/v1/nodes").json()["nodes"]
    assert listed["caps"] == [each for each in explained if each["capped"]]
    return list(explained)


def test_a_driver_limit_counts_only_if_every_container_has_one() -> None:
    (cap,) = capped(shared("A"), a=2 * GIB, b=3 * GIB)
    assert (cap["enforcer"], cap["limit_bytes"], cap["capped"]) == ("driver", 5 * GIB, True)
    assert cap["message"] == "capped at 5.0 GiB by the driver"
    unlimited: list[dict[str, int | None]] = [
        {},
        {"a": 2 * GIB},
        {"a": 2 * GIB, "b": None},
        {
            "a": 2 * GIB,
            "b": 3 * GIB,
            "c": None,
        },  # Container c uses the device without holding a replica.
    ]
    for limits in unlimited:
        (cap,) = capped(shared("A"), **limits)
        assert (cap["enforcer"], cap["limit_bytes"], cap["capped"]) == (None, None, False)
        assert cap["message"] == "not capped: it can allocate more than it requests"


def test_a_limit_on_a_mig_device_counts_only_if_the_device_is_not_shared() -> None:
    (cap,) = capped(mig("M", 1, memory_bytes=10 * GIB))
    assert (cap["enforcer"], cap["limit_bytes"], cap["capped"]) == ("mig", 10 * GIB, True)
    assert cap["message"] == "capped at 10.0 GiB, the memory of its MIG device"
    replicas = mig("M", 1, sharing="time-slicing", replicas=Replicas(free=1, allocated=3))
    assert [each["capped"] for each in capped(replicas)] == [False]
    # Two compute instances share the memory of their GPU instance.
    assert [each["capped"] for each in capped(mig("M", 1), mig("N", 1))] == [False, False]


def test_a_limit_of_mps_is_never_proven() -> None:
    (cap,) = capped(shared("A", sharing="mps", memory_bytes=25 * GIB), share="limit")
    assert (cap["enforcer"], cap["limit_bytes"], cap["capped"]) == ("mps", 25 * GIB // 4, False)
    assert cap["message"] == (
        "not certain to be capped: MPS limits each process to at most 6.2 GiB, but no reading "
        "confirms this"
    )


def test_a_pod_that_requests_a_limit_reads_that_it_is_not_enforced() -> None:
    (cap,) = capped(shared("A"), share="limit")
    assert not cap["capped"]
    assert cap["message"] == (
        "not capped: headroom.gpu/share is limit, but the driver reports no limit for all "
        "containers; see docs/how-to/limit-memory.md#check-the-limit"
    )
    (cap,) = capped(shared("A"), share="nonsense")
    assert cap["message"] == "not capped: it can allocate more than it requests"
