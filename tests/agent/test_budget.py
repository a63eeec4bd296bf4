"""Counts the writes that the API server receives from an agent in an hour."""

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from kubernetes.client import ApiClient

from agent.kube_client import of_client
from agent.kube_publisher import KubernetesPublisher
from agent.status_writer import StatusWriter
from headroom.contract.gpunode import GPUNodeStatus
from tests.accounting import written
from tests.builders import GIB, MIB, shared, use
from tests.controlplane import ControlPlane

HOUR_S = 3600
INTERVAL_S = 5
GPUNODES = "/apis/headroom.gpu/v1alpha1/gpunodes"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
BEGAN = datetime(2026, 11, 21, tzinfo=UTC)
#: Returns the observed status of the node's only device at each second.
Life = Callable[[int], GPUNodeStatus]
Record = Callable[[str, object], None]


def idle(at_s: int) -> GPUNodeStatus:
    return GPUNodeStatus(devices=[shared()])


def one_pod(at_s: int) -> GPUNodeStatus:
    """Return the status of a node on which a pod starts after ten minutes, allocates memory once,
    and ends after half an hour.
    """
    if not 600 <= at_s < 1800:
        return idle(at_s)
    used_bytes = 8 * GIB if at_s >= 660 else 0
    device = shared(free=3, allocated=1, used_bytes=used_bytes)
    return GPUNodeStatus(devices=[device], pods=[use("u", "GPU-0", used_bytes, replica="GPU-0::0")])


def restless(at_s: int) -> GPUNodeStatus:
    """Return a status whose memory use changes with every sample."""
    return GPUNodeStatus(devices=[shared(used_bytes=GIB + at_s // INTERVAL_S % 2 * 512 * MIB)])


@pytest.mark.parametrize(
    ("life", "reports"),
    [
        pytest.param(idle, (1, 1), id="idle"),
        pytest.param(one_pod, (4, 4), id="a pod that starts, grows and ends"),
        pytest.param(restless, (700, 720), id="changes with every sample"),
    ],
)
def test_writes_in_an_hour_stay_within_the_budget(
    plane: ControlPlane, life: Life, reports: tuple[int, int], record_property: Record
) -> None:
    name = life.__name__.replace("_", "-")
    plane.call("POST", GPUNODES, {
        "apiVersion": "headroom.gpu/v1alpha1", "kind": "GPUNode", "metadata": {"name": name},
    })  # fmt: skip
    now_s = 0
    with ApiClient(plane.configuration()) as client:
        publisher = KubernetesPublisher(of_client(client), name, "default", 30.0)
        status_writer = StatusWriter(
            publisher,
            30.0,
            lambda: now_s,
            lambda: BEGAN + timedelta(seconds=now_s),
            random.Random(1),
        )
        before = written(plane)
        for now_s in range(0, HOUR_S, INTERVAL_S):
            observed_at = (BEGAN + timedelta(seconds=now_s)).isoformat()
            status = msgspec.structs.replace(life(now_s), observed_at=observed_at)
            status_writer.deliver(status, now_s)
        counts = written(plane) - before
        reported = counts["PATCH gpunodes/status"]
        beats = counts["PATCH leases"] + counts["POST leases"]
        client.rest_client.pool_manager.clear()
    plane.call("DELETE", f"{GPUNODES}/{name}")
    plane.call("DELETE", f"{LEASES}/{name}")
    record_property("measured", f"{reported} reports, {beats} heartbeats")
    least, most = reports
    assert least <= reported <= most
    assert 119 <= beats <= 120
    assert status_writer.writes["heartbeat", "accepted"] <= 120
