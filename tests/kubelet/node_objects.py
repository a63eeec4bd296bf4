"""Pods, configuration and files of a node with real kubelet and plugin."""

import os
from typing import Any

from tests.driver import Gpu

RESOURCE = "nvidia.com/gpu"

#: Values that the kubelet would write to /proc/sys.
KERNEL = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}

NUMA = "/sys/devices/system/node"
PCI = "/sys/bus/pci/devices"


def gpu_pod(name: str, resource: str = RESOURCE, **spec: Any) -> dict[str, Any]:
    """A pod of one container, ``main``; ``spec`` adds to the pod's or replaces."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [gpu_container("main", resource=resource)],
        }
        | spec,
    }


def gpu_container(
    name: str, *command: str, gpus: int = 1, takes_bytes: int = 0, resource: str = RESOURCE
) -> dict[str, Any]:
    return {
        "name": name,
        "image": "any",
        "command": list(command),
        "env": [{"name": "TAKES_VRAM", "value": str(takes_bytes)}],
        "resources": {"limits": {resource: gpus}},
    }


def numa_files(gpus: list[Gpu]) -> dict[str, str]:
    """The files of a machine with devices on several NUMA nodes, for kubelet and plugin."""
    count = 1 + max(gpu.numa or 0 for gpu in gpus)
    files = {}
    for cpu in range(os.cpu_count() or 1):
        topology = f"{NUMA}/node{cpu % count}/cpu{cpu}/topology"
        files[f"{topology}/core_id"] = f"{cpu}\n"
        files[f"{topology}/physical_package_id"] = f"{cpu % count}\n"
    for numa in range(count):
        distances = " ".join("10" if other == numa else "20" for other in range(count))
        files[f"{NUMA}/node{numa}/distance"] = f"{distances}\n"
        files[f"{NUMA}/node{numa}/meminfo"] = f"Node {numa} MemTotal: {8 << 20} kB\n"
        files[f"{NUMA}/node{numa}/hugepages/hugepages-2048kB/nr_hugepages"] = "0\n"
    for index, gpu in enumerate(gpus):  # as the fake driver library numbers them
        numa_node = -1 if gpu.numa is None else gpu.numa
        files[f"{PCI}/0000:{index + 1:02x}:00.0/numa_node"] = f"{numa_node}\n"
    return files


def plugin_configuration(replicas: int) -> dict[str, Any]:
    """The configuration of NVIDIA's device plugin; a single replica is no sharing."""
    if replicas == 1:
        return {}
    shared = {"name": RESOURCE, "replicas": replicas}
    return {"sharing": {"timeSlicing": {"resources": [shared]}}}
