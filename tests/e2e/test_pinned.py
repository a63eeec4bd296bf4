"""A pinned node with a real kubelet and plugin: containers get the device of their placement.

The plugin gives each container a replica of any device; what the kubelet then hands to the runtime,
and where the driver counts the memory, is read here and compared with the Binding.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.controlplane import ControlPlane
from tests.driver import GIB
from tests.e2e.cluster import placement
from tests.e2e.nodes import RESOURCE
from tests.e2e.real import RealCluster
from tests.kubelet.node import Node
from tests.loopback import LOOPBACK

MERGE = "application/merge-patch+json"
VARIABLE = "NVIDIA_VISIBLE_DEVICES"


@pytest.fixture(scope="module")
def cluster(plane: ControlPlane, binaries: None) -> Iterator[RealCluster]:
    """One node of two GPUs, each of 24 GiB and shared by four, which is to be pinned."""
    real = RealCluster(plane, 1, gpus=2, replicas=4)
    try:
        real.create()
        (name,) = real.names
        request = {"metadata": {"annotations": {"headroom.gpu/device-choice": "pinned"}}}
        plane.call("PATCH", f"/api/v1/nodes/{name}", request, MERGE)
        real.bring_up()
        yield real
    finally:
        real.close()


@pytest.fixture(autouse=True)
def _empty(cluster: RealCluster) -> Iterator[None]:
    """However a test ends, the next one finds an idle node whose toolkit is not known to obey."""
    yield
    (machine,) = cluster.machines.values()
    toolkit(machine).unlink(missing_ok=True)
    cluster.empty()
    cluster.until(lambda: pinning(cluster) == "unknown", "the report has no toolkit any more")


def pinning(cluster: RealCluster) -> str:
    (node,) = cluster.gpunodes()
    return node.status.plugin.pinning if node.status else ""


def toolkit(machine: Node) -> Path:
    """The configuration of the container toolkit, where the agent looks for it."""
    return machine.runtime.proc / "1/root/etc/nvidia-container-runtime/config.toml"


def obey(machine: Node) -> None:
    """The toolkit gives a container the devices that its variable names."""
    toolkit(machine).parent.mkdir(parents=True, exist_ok=True)
    toolkit(machine).write_text("")


def follow(cluster: RealCluster, name: str, *sizes_gib: int) -> None:
    """Create a pod with a container for each size, which follows its placement."""
    containers = [
        {
            "name": f"c{index}",
            "image": "none",
            "env": [
                {"name": "TAKES_VRAM", "value": str(gib * GIB)},
                {
                    "name": VARIABLE,
                    "valueFrom": {
                        "fieldRef": {
                            "fieldPath": f"metadata.annotations['headroom.gpu/devices.{index}']"
                        }
                    },
                },
            ],
            "resources": {"limits": {RESOURCE: "1"}},
        }
        for index, gib in enumerate(sizes_gib)
    ]
    cluster.asked_bytes[name] = sum(sizes_gib) * GIB
    vram = ",".join(f"c{index}={gib}Gi" for index, gib in enumerate(sizes_gib))
    cluster.create_pod(name, vram, containers=containers, terminationGracePeriodSeconds=1)


def devices(cluster: RealCluster) -> dict[str, Any]:
    """The extender's view of the devices of the node."""
    (node,) = LOOPBACK.get(f"{cluster.debug_url()}/v1/nodes").json()["nodes"]
    return {device["uuid"]: device for device in node["devices"]}


def test_every_container_gets_the_device_of_its_placement(cluster: RealCluster) -> None:
    (machine,) = cluster.machines.values()
    follow(cluster, "early", 14)
    why = "1 node is to be pinned, but is not known to obey NVIDIA_VISIBLE_DEVICES of its pods."
    cluster.until(lambda: why in cluster.rejection("early"), "the toolkit is not known")
    obey(machine)
    cluster.until(lambda: bool(cluster.node_of("early")), "it is known, and the pod is bound")

    # Two devices of 24 GiB: these fit in one way only, and the plugin's choice would not do.
    for name, sizes in (("b", (14,)), ("c", (4, 6)), ("d", (10,))):
        follow(cluster, name, *sizes)
        cluster.until(lambda name=name: bool(cluster.node_of(name)), f"{name} is bound")
    cluster.until(cluster.decided, "all of them run")
    assert {pod["status"]["phase"] for pod in cluster.pods()} == {"Running"}
    for pod in cluster.pods():
        name = pod["metadata"]["name"]
        message = placement(pod)["containers"]
        running = machine.runtime.running(name)
        assert running.keys() == message.keys()
        for container in running.values():
            assert container.devices == message[container.name]["devices"]
    for gpu in machine.driver.gpus:
        assert machine.driver.least_free_bytes[gpu.uuid] == 0
    # The kubelet and the plugin know nothing of it: they count replicas.
    assert len(machine.held()) == 5

    follow(cluster, "more", 1)
    full = "1 insufficient GPU memory on any device."
    cluster.until(lambda: full in cluster.rejection("more"), "one more does not fit")


def test_a_pod_that_uses_another_device_than_its_placement_is_charged_there(
    cluster: RealCluster,
) -> None:
    (machine,) = cluster.machines.values()
    obey(machine)
    for name in ("one", "two"):
        follow(cluster, name, 14)
        cluster.until(lambda name=name: bool(cluster.node_of(name)), f"{name} is bound")
    cluster.until(cluster.decided, "ten GiB are free on each device")
    follow(cluster, "stray", 4)
    cluster.until(lambda: "c0" in machine.runtime.running("stray"), "it runs")
    (own,) = placement(cluster.pod("stray"))["containers"]["c0"]["devices"]
    (other,) = {gpu.uuid for gpu in machine.driver.gpus} - {own}
    pid = machine.runtime.running("stray")["c0"].pid
    machine.driver.use(pid, {other: 5 * GIB})

    def charged(uuid: str) -> set[tuple[str, int]]:
        holders = devices(cluster)[uuid]["holders"]
        return {(h["name"], max(h["requested_bytes"], h["measured_bytes"] or 0)) for h in holders}

    cluster.until(lambda: ("stray", 5 * GIB) in charged(other), "the process table shows it")
    assert ("stray", 4 * GIB) in charged(own)
    follow(cluster, "late", 6)
    cluster.until(lambda: bool(cluster.node_of("late")), "it fits beside the reservation")
    assert placement(cluster.pod("late"))["containers"]["c0"]["devices"] == [own]
