"""Tests /v1/drift and its metrics, which compare reserved with measured use and predicted with
actual devices.
"""

import json
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from headroom.console.view_context import Context
from headroom.console.views.drift import claim_views, drift_views
from headroom.contract.gpunode import (
    Charge,
    Device,
    GPUNode,
    GPUNodeSpec,
    GPUNodeStatus,
    Plugin,
    PodUse,
    Replicas,
    Reservation,
)
from headroom.contract.kube import ObjectMeta
from headroom.contract.watched import ClaimSeen, GPUNodeSeen, SliceSeen
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.policy import Rules
from headroom.runtime.follow.claims import Claims
from tests.builders import DISTRIBUTED, gpunode, reservation, shared, use
from tests.serving import Server, binding, offer, pod, serving
from tests.state.test_claimed_devices import claim, piece
from tests.state.test_claimed_devices import report as use_report

GI = 1 << 30
FLEET = """
nodes:
  - {name: shared, gpus: 2, memory: 24Gi, sharing: time-slicing, replicas: 4}
"""


def place(server: Server, name: str, vram: str) -> None:
    asked = pod(name, vram)
    server.post("/filter", offer(asked, "shared"))
    assert server.post("/bind", binding(asked, "shared")).json()["Error"] == ""


def report(server: Server, plugin: Plugin = DISTRIBUTED, **gpu_of: int) -> None:
    """Report these pods. ``gpu_of`` maps each pod to the index of its GPU, and each pod
    uses 1 GiB.
    """
    devices = [
        Device(
            uuid=f"GPU-shared-{n}",
            memory_bytes=24 * GI,
            reserved_bytes=0,
            used_bytes=GI * (here := list(gpu_of.values()).count(n)),
            unattributed_bytes=0,
            sharing="time-slicing",
            resource="nvidia.com/gpu",
            replicas=Replicas(free=4 - here, allocated=here),
        )
        for n in range(2)
    ]
    rows = [
        PodUse(
            uid=f"uid-{name}",
            device=f"GPU-shared-{n}",
            replica=f"GPU-shared-{n}::{number}",
            used_bytes=GI,
            peak_bytes=3 * GI if name == "a" else None,
        )
        for number, (name, n) in enumerate(gpu_of.items())
    ]
    status = GPUNodeStatus(
        observed_at="2026-11-21T00:00:00Z", devices=devices, pods=rows, plugin=plugin
    )
    body = [{"node": "shared", "status": msgspec.to_builtins(status)}]
    assert server.debug_post("/embedded/v1/reports", body).status == 204


@pytest.mark.slow
def test_drift_lists_predicted_and_actual_devices_of_each_pod() -> None:
    with serving(FLEET) as server:
        place(server, "a", "8Gi")
        (waiting,) = server.get("/v1/drift").json()["pods"]
        assert (waiting["result"], waiting["observed"]) == ("waiting", [])
        assert waiting["predicted"] == ["GPU-shared-0", "GPU-shared-1"]
        report(server, a=0)
        place(server, "b", "20Gi")  # GPU-shared-1 has fewer allocated replicas.
        report(server, a=0, b=0)
        shown = server.get("/v1/drift").json()
        a, b = sorted(shown["pods"], key=lambda each: str(each["name"]))
        assert (a["result"], a["surprise"]) == ("hit", None)
        assert a["observed"] == [
            {
                "uuid": "GPU-shared-0",
                "reserved_bytes": 8 * GI,
                "measured_bytes": GI,
                "peak_bytes": 3 * GI,
            }
        ]
        assert (b["result"], b["predicted"]) == ("miss", ["GPU-shared-1"])
        assert b["observed"] == [
            {
                "uuid": "GPU-shared-0",
                "reserved_bytes": None,
                "measured_bytes": GI,
                "peak_bytes": None,
            }
        ]
        assert b["message"] == "no change in the reports explains the miss"
        assert shown["results"] == {"hit": 1, "shifted": 0, "miss": 1, "unseen": 0}
        (miss,) = shown["misses"]
        assert (miss["name"], miss["surprise"]) == ("b", "unknown")
        assert miss["overcommitted_bytes"] == 4 * GI
        short = server.get("/v1/drift?pods=false").json()
        assert (short["pods"], short["results"]) == ([], shown["results"])

        metrics = server.get("/metrics").body.decode()
        assert 'headroom_predictions_total{result="hit"} 1.0' in metrics
        assert 'headroom_predictions_total{result="miss"} 1.0' in metrics
        misses = 'headroom_prediction_misses_total{overcommitted="yes",surprise="unknown"} 1.0'
        assert misses in metrics
        assert "headroom_prediction_window_seconds_count 2.0" in metrics
        over = 'headroom_overcommitted_bytes{device="GPU-shared-0",node="shared"} 4.294967296e+09'
        assert over in metrics
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        (logged,) = [line for line in lines if line["event"] == "prediction_missed"]
        assert (logged["pod"], logged["surprise"]) == ("default/b", "unknown")
        assert logged["devices"] == ["GPU-shared-0"]


@pytest.mark.slow
def test_drift_lists_the_chosen_and_the_actual_device() -> None:
    """Only on nodes with a steering agent is a device chosen."""
    steered = Plugin(topology_manager_policy="none", steered=["nvidia.com/gpu"])
    with serving(FLEET) as server:
        report(server, steered)
        place(server, "a", "8Gi")
        (waiting,) = server.get("/v1/drift").json()["pods"]
        (device,) = waiting["choice"]
        assert waiting["predicted"] == [device]
        other = 1 - int(device[-1])
        report(server, Plugin(topology_manager_policy="none"), a=other)
        shown = server.get("/v1/drift").json()
        (a,) = shown["pods"]
        assert (a["result"], a["surprise"]) == ("miss", "configuration")
        assert (a["choice"], a["observed"][0]["uuid"]) == ([device], f"GPU-shared-{other}")
        assert [miss["choice"] for miss in shown["misses"]] == [[device]]
        place(server, "b", "4Gi")
        (b,) = (each for each in server.get("/v1/drift").json()["pods"] if each["name"] == "b")
        assert b["choice"] == []


def test_drift_sums_the_reservations_of_a_pods_containers_on_a_device() -> None:
    gpu = "nvidia.com/gpu"
    charges = [Charge(gpu, 1, {"A": 8 * GI, "B": 8 * GI}), Charge(gpu, 1, {"A": 2 * GI})]
    spec = GPUNodeSpec(True, {"u": Reservation("default", "p", charges)})
    status = GPUNodeStatus(pods=[PodUse("u", "A", "A::0"), PodUse("u", "B", "B::0")])
    cluster = ClusterWriter(Rules(), 90.0, 0.0)
    cluster.apply([GPUNodeSeen(GPUNode(ObjectMeta(name="n"), spec=spec, status=status), 0.0)])
    (shown,) = drift_views(cluster.cluster)
    assert {on.uuid: on.reserved_bytes for on in shown.observed} == {"A": 10 * GI, "B": 8 * GI}


def test_drift_shows_claims_of_dra_next_to_measured_use() -> None:
    cluster = ClusterWriter(Rules(), 90.0, 0.0)
    node = GPUNode(metadata=ObjectMeta(name="n"), status=use_report(unattributed=1 << 30, a=9))
    cluster.apply([GPUNodeSeen(node, 0.0)])
    claims = Claims(lambda: 0.0)
    claims.apply([SliceSeen(piece()), SliceSeen(piece("unreported", name="t"))])
    claims.apply([ClaimSeen(claim("c", "a", "8Gi")), ClaimSeen(claim("d", "b", "16Gi"))])
    context = cast(Context, SimpleNamespace(cluster=cluster.cluster, claims=claims))
    rows = [view.model_dump() for view in claim_views(context)]
    where = {"node": "n", "uuid": "GPU-0", "pool": "n", "device": "gpu-0"}
    assert rows == [
        where | dict(zip(PART, row, strict=True))
        for row in [
            ("t", "pod-a", "a", ["c"], 8 * GI, 9 * GI, GI),
            ("t", "pod-b", "b", ["d"], 16 * GI, 0, 0),
            ("", "", "", [], 0, GI, GI),
        ]
    ]


PART = ("namespace", "name", "uid", "claims", "claimed_bytes", "measured_bytes", "excess_bytes")


def test_drift_shows_overuse_at_once() -> None:
    cluster = ClusterWriter(Rules(), 90.0, 0.0)
    reservations = {"u": reservation({"a": 8 * GI}), "v": reservation({"a": 8 * GI})}
    uses = [use("u", "a", 10 * GI, replica="a::0"), use("v", "a", GI, replica="a::1")]
    device = shared("a", free=2, allocated=2, used_bytes=11 * GI)
    cluster.apply([GPUNodeSeen(gpunode(device, pods=uses, reservations=reservations), 0.0)])
    shown = {each.uid: each.overuse_bytes for each in drift_views(cluster.cluster)}
    assert shown == {"u": 2 * GI, "v": 0}
