"""Serves the interfaces of a stand-in node that an agent reads: the PodResources socket and the
checkpoint file.

They have the same relative paths as below /var/lib/kubelet.
"""

from collections.abc import Iterable
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from tests.standin import checkpoint
from tests.standin.allocations import RESOURCE, Checkpoint, Pod
from tests.standin.node import StandIn
from tests.standin.plugin import Replica

api, services = grpc.protos_and_services("tests/kubelet/podresources.proto")


def write_checkpoint(root: Path, content: Checkpoint) -> None:
    """Write the file atomically, so that a reader sees either the old or the new checkpoint."""
    folder = root / "device-plugins"
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{checkpoint.NAME}"
    unfinished.write_bytes(checkpoint.render(content))
    unfinished.rename(folder / checkpoint.NAME)


class PodResources(services.PodResourcesListerServicer):  # type: ignore[name-defined,misc]
    """The kubelet's PodResources service. The responses come from the node's device manager."""

    def __init__(self, node: StandIn) -> None:
        self._node = node

    def List(self, request: Any, context: Any) -> Any:
        with self._node.lock:
            listed = self._node.pod_resources()
        return api.ListPodResourcesResponse(pod_resources=[_pod(*each) for each in listed])

    def Get(self, request: Any, context: Any) -> Any:
        namespace, name = request.pod_namespace, request.pod_name
        with self._node.lock:
            pods = [held.pod for held in self._node.pods.values() if held.counts]
            named = [pod for pod in pods if (pod.namespace, pod.name) == (namespace, name)]
            listed = [_pod(pod, self._node.listed(pod)) for pod in named]
        if not listed:
            context.abort(grpc.StatusCode.UNKNOWN, f"pod {name} in namespace {namespace} not found")
        return api.GetPodResourcesResponse(pod_resources=listed[0])

    def GetAllocatableResources(self, request: Any, context: Any) -> Any:
        with self._node.lock:
            healthy = self._node.devices.allocatable
        return api.AllocatableResourcesResponse(devices=_devices(healthy))


def _pod(pod: Pod, listed: dict[str, list[Replica]]) -> Any:
    return api.PodResources(
        name=pod.name,
        namespace=pod.namespace,
        containers=[
            api.ContainerResources(name=name, devices=_devices(replicas))
            for name, replicas in listed.items()
        ],
    )


def _devices(replicas: Iterable[Replica]) -> list[Any]:
    """Return one entry per replica, as the kubelet does."""
    return [
        api.ContainerDevices(
            resource_name=RESOURCE,
            device_ids=[each.id],
            topology=None if each.numa is None else {"nodes": [{"ID": each.numa}]},
        )
        for each in replicas
    ]


class Served:
    """Serves PodResources on ``<root>/pod-resources/kubelet.sock``. ``stop`` removes the socket."""

    def __init__(self, node: StandIn, root: Path) -> None:
        self.socket = root / "pod-resources/kubelet.sock"
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        services.add_PodResourcesListerServicer_to_server(PodResources(node), self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(grace=None).wait()
