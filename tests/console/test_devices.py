"""/v1/nodes/{name}/devices/{uuid}: one device and the pods on it."""

import msgspec
import pytest

from contract.gpunode import ContainerLimit, Replicas, Reservation, UnattributedProcess
from extender.state.changes import GPUNodeSeen, NodeSeen, PodSeen
from tests.builders import GIB, gpunode, kube_node, mig, pod, reservation, shared, use
from tests.console.asking import Asked

SINCE = "2026-11-20T23:00:00+00:00"


def since(reservation: Reservation) -> Reservation:
    return msgspec.structs.replace(reservation, since=SINCE)


@pytest.fixture
def fleet() -> Asked:
    """GPU A: one pod runs, one ends, one is unreserved, one is gone; one is unconfirmed."""
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
    asked.cluster.apply(
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
    assert (runs["since"], runs["priority"]) == (SINCE, 9)
    assert runs["containers"][0]["replica"] == "A::0"
    assert body["unattributed_processes"] == [
        {"pid": 4711, "command": "python3", "used_bytes": GIB}
    ]
    assert body["health"] == {"healthy": False, "detail": "XID 79", "since": SINCE}
    assert (body["limits"][0]["hard_bytes"], body["limits"][0]["used_bytes"]) == (8 * GIB, None)
    assert body["device"]["unhealthy"] == "unhealthy_device"


def test_the_sharing_of_a_device_is_shown(fleet: Asked) -> None:
    mps = fleet.get("/v1/nodes/n/devices/B").json()
    assert (mps["mps_process_limit_bytes"], mps["replicas"]) == (6 * GIB, 4)
    instance = fleet.get("/v1/nodes/n/devices/MIG-1").json()
    assert (instance["mig_parent"], instance["mig_gpu_instance"]) == ("GPU-0", 3)
    assert instance["unattributed_processes"] is None  # unknown


def test_an_unknown_device_is_answered_with_the_known_ones(fleet: Asked) -> None:
    for path, message in (
        ("/v1/nodes/n/devices/Z", "node n has no device Z; it reports: A, B, MIG-1"),
        ("/v1/nodes/m/devices/A", "node m is not known; GET /v1/nodes lists the known nodes"),
    ):
        answer = fleet.get(path)
        assert (answer.status_code, answer.json()["detail"]) == (404, message)
