"""A real node with an agent that steers. The test writes the reservations."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from headroom.contract.gpunode import GPUNode, GPUNodeStatus
from headroom.contract.gpunode_json import decode_gpunode
from tests.controlplane import ApiRefused
from tests.driver import Gpu
from tests.kubelet.conftest import STEERED_KUBELET, StartNode
from tests.kubelet.node import PODS, Node
from tests.kubelet.node_objects import gpu_pod

GIB = 1 << 30
GPUNODES = "/apis/headroom.gpu/v1alpha1/gpunodes"


class SteeredNode:
    """Runs an agent that steers on ``node``, and writes reservations."""

    def __init__(self, node: Node, flags: Sequence[str] = ()) -> None:
        self.node = node
        self.plane = node.plane
        self.resource = node.resource
        spec = {"initialised": True, "reservations": {}}
        body = {
            "apiVersion": "headroom.gpu/v1alpha1",
            "kind": "GPUNode",
            "metadata": {"name": node.name},
            "spec": spec,
        }
        with contextlib.suppress(ApiRefused):  # Another test has created it.
            namespace = {"metadata": {"name": "headroom-system"}}
            self.plane.call("POST", "/api/v1/namespaces", namespace)
        self.plane.call("POST", GPUNODES, body)
        self.start_agent(*flags)

    def start_agent(self, *flags: str) -> None:
        """Start an agent. Without ``flags``, it steers, and this method waits for its first report,
        because the report of a killed agent remains.
        """
        steer = flags or ("--device-choice=steered",)
        before = self.observed_at()
        self.node.start_agent(self.plane.kubeconfig(), *steer)
        if not flags:
            self.node.wait(lambda: self.observed_at() != before, "a report of this agent")
            self.until_steered()

    def until_steered(self) -> None:
        self.node.wait(lambda: self.steered() == [self.resource], "a node that is steered")

    def gpunode(self) -> GPUNode:
        found = self.plane.call("GET", f"{GPUNODES}/{self.node.name}")
        return decode_gpunode(msgspec.json.encode(found))

    def reported(self) -> GPUNodeStatus:
        return self.gpunode().status or GPUNodeStatus()

    def observed_at(self) -> str:
        return self.reported().observed_at

    def steered(self) -> list[str]:
        return self.reported().plugin.steered

    def obstacle(self) -> str:
        return self.reported().plugin.choice_obstacle

    def choose(self, choice: str) -> None:
        """Write the device choice as an extender does when the Node's annotation changes."""
        patch = {"spec": {"deviceChoice": choice}}
        self.plane.call("PATCH", f"{GPUNODES}/{self.node.name}", patch)

    def reservation(
        self, pod: dict[str, Any], device: str | Sequence[str], gib: int, count: int = 0
    ) -> None:
        """Create the pod and write its reservation, as the extender does before it binds.

        The pod requests ``count`` replicas, by default one per device.
        """
        self.plane.call("POST", PODS, pod)
        name = pod["metadata"]["name"]
        devices = [device] if isinstance(device, str) else list(device)
        charge = {
            "resource": self.resource,
            "count": count or len(devices),
            "candidates": dict.fromkeys(devices, gib * GIB),
            "choices": devices,
        }
        reservation = {"namespace": "default", "name": name, "charges": [charge]}
        patch = {"spec": {"reservations": {self.node.uid(name): reservation}}}
        self.plane.call("PATCH", f"{GPUNODES}/{self.node.name}", patch)

    def forget(self, uids: Sequence[str]) -> None:
        """Remove the reservations of deleted pods, as the extender does."""
        patch = {"spec": {"reservations": dict.fromkeys(uids)}}
        self.plane.call("PATCH", f"{GPUNODES}/{self.node.name}", patch)

    def bind(self, name: str) -> None:
        self.plane.bind(PODS, name, self.node.name)

    def place(self, name: str, device: str, gib: int = 4) -> str:
        """Reserve a device for a new pod, bind the pod and wait. Return the device that the pod
        got.
        """
        self.reservation(gpu_pod(name, self.resource), device, gib)
        self.bind(name)
        self.node.wait(lambda: self.node.held(name), f"a pod {name} that was admitted")
        (held,) = self.node.held(name)
        return held.device

    def device(self, pod: str) -> str:
        """Run a pod without a reservation. Return the device that it got."""
        (held,) = self.node.admit(gpu_pod(pod))
        return held.device

    def observed(self, name: str) -> bool:
        return any(row.name == name for row in self.reported().pods)

    def stop(self) -> None:
        with contextlib.suppress(ApiRefused):
            self.plane.call("DELETE", f"{GPUNODES}/{self.node.name}")


StartSteered = Callable[..., SteeredNode]


@pytest.fixture
def start_steered(start_node: StartNode) -> Iterator[StartSteered]:
    with contextlib.ExitStack() as stack:

        def start(
            gpus: int | list[Gpu] = 2,
            replicas: int = 3,
            flags: Sequence[str] = (),
            kubelet: str = STEERED_KUBELET,
            **settings: Any,
        ) -> SteeredNode:
            settings["kubelet"] = kubelet
            steered = SteeredNode(start_node(gpus, replicas, **settings), flags)
            stack.callback(steered.stop)
            return steered

        yield start
