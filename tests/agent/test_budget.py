"""How often an agent writes: an hour of a node, counted at the API server that was written to."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from kubernetes.client import ApiClient

from agent.cluster import KubernetesPublisher
from agent.publish import Courier
from contract.gpunode import GPUNodeStatus
from tests.builders import GIB, MIB, shared, use
from tests.controlplane import ControlPlane

HOUR_S = 3600
INTERVAL_S = 5
GPUNODES = "/apis/headroom.gpu/v1alpha1/gpunodes"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
BEGAN = datetime(2026, 11, 21, tzinfo=UTC)
#: At each of so many seconds, what the node's one device is seen to hold.
Life = Callable[[int], GPUNodeStatus]


def idle(at_s: int) -> GPUNodeStatus:
    return GPUNodeStatus(devices=[shared()])


def one_pod(at_s: int) -> GPUNodeStatus:
    """It comes after ten minutes, takes memory once, and goes after half an hour."""
    if not 600 <= at_s < 1800:
        return idle(at_s)
    used_bytes = 8 * GIB if at_s >= 660 else 0
    device = shared(free=3, allocated=1, used_bytes=used_bytes)
    return GPUNodeStatus(devices=[device], pods=[use("u", "GPU-0", used_bytes, replica="GPU-0::0")])


def restless(at_s: int) -> GPUNodeStatus:
    """Its memory is another one in every sample, and less in every other."""
    return GPUNodeStatus(devices=[shared(used_bytes=GIB + at_s // INTERVAL_S % 2 * 512 * MIB)])


@pytest.fixture
def version(plane: ControlPlane) -> Iterator[Callable[[str], str]]:
    def read(path: str) -> str:
        return str(plane.call("GET", path)["metadata"]["resourceVersion"])

    yield read
    plane.call("DELETE", LEASES)


@pytest.mark.parametrize(
    ("life", "most"),
    [
        pytest.param(idle, {"report": 1, "heartbeat": 120}, id="idle"),
        pytest.param(one_pod, {"report": 4, "heartbeat": 120}, id="a pod that comes and goes"),
        pytest.param(restless, {"report": 720, "heartbeat": 120}, id="never at rest"),
    ],
)
def test_an_hour_of_a_node(
    plane: ControlPlane, version: Callable[[str], str], life: Life, most: dict[str, int]
) -> None:
    name = life.__name__.replace("_", "-")
    plane.call("POST", GPUNODES, {
        "apiVersion": "headroom.gpu/v1alpha1", "kind": "GPUNode", "metadata": {"name": name},
    })  # fmt: skip
    now_s = 0
    seen: Counter[str] = Counter()
    last: dict[str, str] = {"report": version(f"{GPUNODES}/{name}")}
    with ApiClient(plane.configuration()) as client:
        publisher = KubernetesPublisher(client, name, "default", 30.0)
        courier = Courier(
            publisher, 30.0, lambda: now_s, lambda: BEGAN + timedelta(seconds=now_s), random.Random(1)
        )
        for now_s in range(0, HOUR_S, INTERVAL_S):
            observed_at = (BEGAN + timedelta(seconds=now_s)).isoformat()
            status = life(now_s)
            courier.deliver(
                GPUNodeStatus(observed_at=observed_at, devices=status.devices, pods=status.pods), now_s
            )
            # A version is new for every write that was taken.
            for what, path in (("report", f"{GPUNODES}/{name}"), ("heartbeat", f"{LEASES}/{name}")):
                if now_s % 30 == 0 or what == "report":
                    found = version(path)
                    seen[what] += found != last.get(what)
                    last[what] = found
        client.rest_client.pool_manager.clear()
    plane.call("DELETE", f"{GPUNODES}/{name}")
    assert dict(seen) == {what: courier.writes[what, "accepted"] for what in seen}
    for what, count in most.items():
        assert count - 1 <= seen[what] <= count
