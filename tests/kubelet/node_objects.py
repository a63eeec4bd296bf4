"""Builds pods, configuration and files for a node with a real kubelet and device plugin."""

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.certificates import Certificate
from tests.controlplane import ApiRefused, ControlPlane
from tests.driver import Gpu

RESOURCE = "nvidia.com/gpu"

#: Kernel settings with the values that the kubelet requires. Otherwise, the kubelet would write
#: them to /proc/sys.
KERNEL = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}

#: Name of the tmpfs mounts. Its own name is needed, because ``mount`` skips a target that is
#: already mounted with the same name.
SOURCE = "headroom"

NUMA = "/sys/devices/system/node"
PCI = "/sys/bus/pci/devices"

#: A script that makes the mounts that ``write_mounts`` wrote to the folder "$1", and then runs the
#: command in "$@".
INSIDE = """
set -e
cd "$1" && shift
mount --all --fstab mounts
exec "$@"
"""

_CLONE_NEWNS = 0x20000
_PRIVATE_AND_BELOW = 0x44000


def write_mounts(folder: Path, covered: Iterable[str]) -> None:
    """Write the mounts for ``INSIDE``. Each path in ``covered`` shows the path with this name in
    the folder ``over``.

    One command makes all mounts, because each process takes CPU. The kubelet's folder must be a
    shared mount. Otherwise, the kubelet mounts the folder over itself, which can make it exit,
    because the mount races with its rename of a socket in the folder.
    """
    mounts = [(SOURCE, path, "tmpfs", "defaults") for path in ("/var/log", "/var/lib", "/run")]
    mounts += [
        (f"{folder}/kubelet", "/var/lib/kubelet", "none", "bind,rshared,X-mount.mkdir"),
        (f"{folder}/cdi", "/run/cdi", "none", "bind,X-mount.mkdir"),
        *((f"{folder}/over{path}", path, "none", "bind") for path in covered),
    ]
    (folder / "mounts").write_text("".join(f"{' '.join(each)}\n" for each in mounts))


def see_only(folder: Path) -> None:
    """Let this process see the node in ``folder`` as its machine, as ``INSIDE`` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _PRIVATE_AND_BELOW, None):
        raise OSError(ctypes.get_errno(), "the process gets no mount namespace of its own")
    subprocess.run(["sh", "-c", INSIDE, "sh", str(folder), "true"], check=True)


def inside_node(folder: Path, answer_s: float | None) -> None:
    """Let the agent of this process see the node in ``folder`` as its machine, and answer the
    kubelet within ``answer_s`` instead of the shipped time.
    """
    see_only(folder)
    if answer_s is not None:
        # Tests without an agent use this module too, and the agent is not one of their inputs
        # (tests/tiers).
        proxy, allocation = map(
            import_module, ("agent.steering.plugin_proxy", "agent.steering.preferred_allocation")
        )
        proxy.ANSWER_S = allocation.ANSWER_S = answer_s
        allocation.PATIENCE_S = 0.8 * answer_s


def gpu_pod(name: str, resource: str = RESOURCE, **spec: Any) -> dict[str, Any]:
    """Return a pod with the single container ``main``. ``spec`` adds fields to the pod's spec or
    overrides them.
    """
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
    """Return the files from which the kubelet and the plugin read the NUMA nodes of devices."""
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
    for index, gpu in enumerate(gpus):  # Use the bus numbers of the fake driver library.
        numa_node = -1 if gpu.numa is None else gpu.numa
        files[f"{PCI}/0000:{index + 1:02x}:00.0/numa_node"] = f"{numa_node}\n"
    return files


def plugin_configuration(replicas: int) -> dict[str, Any]:
    """Return the configuration of NVIDIA's device plugin. A single replica means no sharing."""
    if replicas == 1:
        return {}
    shared = {"name": RESOURCE, "replicas": replicas}
    return {"sharing": {"timeSlicing": {"resources": [shared]}}}


def kubelet_configuration(runtime: Path, certificate: Certificate) -> dict[str, Any]:
    """Return the configuration of a kubelet that uses this runtime socket but no cgroups and no
    server.
    """
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{runtime}",
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "localStorageCapacityIsolation": False,
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        "podLogsDir": "/var/lib/kubelet/pod-logs",
        "resolvConf": "",
        # Without this address, the kubelet writes an Event at each sync of each pod.
        "clusterDNS": ["10.0.0.10"],
        "enableServer": False,
        # Without this certificate, the kubelet creates an RSA key at each start.
        "tlsCertFile": str(certificate.cert),
        "tlsPrivateKeyFile": str(certificate.key),
        "healthzPort": 0,
        "evictionHard": {"nodefs.available": "0%", "memory.available": "0%"},
        "nodeStatusUpdateFrequency": "1s",
        # By default, this is ``nodeStatusUpdateFrequency``, which would cause one write per node
        # and second.
        "nodeStatusReportFrequency": "10s",
        "syncFrequency": "5s",
    }


def forget(plane: ControlPlane, node: str) -> None:
    """Delete a Node and its kubelet's Lease."""
    lease = f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{node}"
    for path in (f"/api/v1/nodes/{node}", lease):
        with contextlib.suppress(ApiRefused):
            plane.call("DELETE", path)


def is_ready(of: Mapping[str, Any]) -> bool:
    """Return whether a node or a pod is ready."""
    conditions = of["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
