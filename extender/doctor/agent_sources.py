"""What a node's report lacks, and which mount or permission of its agent mends that.

The agent says of each of its sources how it fared (docs/agent.md lists what it says of every
fault). Here it is said what that costs and what to change. A source whose part another one tells is
not missed, and of those that few drivers have nothing is said.
"""

from collections.abc import Iterator

from contract.gpunode import HOLDINGS_SOURCES, PROCESSES_SOURCE, GPUNodeStatus, Source
from extender.doctor.findings import Said, Weight

#: Agent and receiver are not asked to agree by less: reports take a while, and are read late.
CLOCKS_AGREE_S = 5.0

#: Versions of what runs from its sources.
UNKNOWN = frozenset({"", "unknown"})

_HOST_PID = "set hostPID: true in the agent's DaemonSet"
_PTRACE = "add SYS_PTRACE to securityContext.capabilities.add of the agent's container"
_FOLDER = (
    "mount the host's folder /var/lib/kubelet/device-plugins into the agent's container, and let "
    "it read that"
)
_DRIVER = "look at the driver (nvidia-smi and dmesg on the node), then restart the agent's pod"
_UNSEEN = "who uses which memory is not seen, nor what strangers use"
_SETTINGS = "how its device plugin shares and chooses may not be known"
#: Name of a source -> what goes without it, and what mends that as a rule.
_WITHOUT = {
    "nvml": (
        "some of its GPUs' memory or use is not measured",
        "look at the driver (nvidia-smi on the node), and run the agent's container as root where "
        "it has no permission",
    ),
    PROCESSES_SOURCE: (_UNSEEN, f"{_PTRACE}, and let it run as root"),
    "checkpoint": (
        "which pod holds which replica is known in part",
        _FOLDER,
    ),
    "podresources": (
        "which pod holds which replica is known in part",
        "mount the host's folder /var/lib/kubelet/pod-resources into the agent's container, and "
        "let it use the socket in it; see the kubelet's log if that does not answer",
    ),
    "plugin": (_SETTINGS, "see the log of the device plugin's pod there"),
    "labels": (
        "what the labels say of sharing is not compared with what the plugin does",
        "let the agent get its node (deploy/base/rbac.yaml: nodes, get)",
    ),
    "kubelet": ("its topology manager's policy is not known", _HOST_PID),
    "configz": (
        "its topology manager's policy is not known",
        "let the agent get nodes/proxy, or set hostPID: true in its DaemonSet",
    ),
    "mirrors": ("memory of static pods may pass for that of strangers", "let the agent get pods"),
    "xid": ("errors of its GPUs (XIDs) are not heard", _DRIVER),
    "gpm": ("SM activity may be measured less well", _DRIVER),
    "nvml-process": ("SM activity may be measured less well", _DRIVER),
    "dcgm": (
        "SM activity may be measured less well, and NVML's memory is not checked",
        "see dcgm-exporter's pod there, and the address in HEADROOM_DCGM_URL of the agent",
    ),
}
#: Part of a message -> what mends it, where that is not what mends the source as a rule.
_MENDS = {
    "hostPID": _HOST_PID,
    "MIG": (
        "add component deploy/components/mig (Helm: agent.mig: true), or create MIG instances, or "
        "turn MIG off"
    ),
    "no device plugin listens": "see whether the device plugin's pod runs there, and its log",
    "no kubelet listens": "see whether the kubelet runs there, and its log",
    "k3s hides": (
        "set topologyManagerPolicy in a file of /var/lib/rancher/k3s/agent/etc/kubelet.conf.d, or "
        "let the agent get its node"
    ),
    "there is no checkpoint": _FOLDER,
    "several processes listen": "let one device plugin run on the node, not several",
    "CAP_SYS_PTRACE": _PTRACE,
    "headroom.gpu/maintenance": (
        "remove the annotation when the work on the driver is done: "
        "kubectl annotate node NAME headroom.gpu/maintenance-"
    ),
    "nvidia.com/gpu.deploy": "wait for the GPU Operator; see its driver and MIG managers' pods",
    "agent's own cgroup": "take the GPU memory limit off the agent's pod",
    "not what NVML reports": "see whether dcgm-exporter's pod there is stuck, and restart it",
}


def lacking(status: GPUNodeStatus) -> Iterator[Said]:
    """What sources do not tell that nobody else tells either."""
    bad = [source for source in status.sources if source.state != "ok"]
    missing = {source.name for source in bad}
    counted = any(device.replicas.total for device in status.devices)
    blind = missing >= HOLDINGS_SOURCES and not counted
    if blind:
        yield (
            Weight.WARNING,
            "neither the kubelet's checkpoint nor its PodResources can be read: which pod holds "
            "which replica is not known, and of its replicas none counts as free",
            f"{_FOLDER}; and the same of /var/lib/kubelet/pod-resources",
        )
    for source in bad:
        if source.name not in _WITHOUT or (blind and source.name in HOLDINGS_SOURCES):
            continue
        if _told_elsewhere(source, status):
            continue
        costs, mends = _WITHOUT[source.name]
        weight = Weight.WARNING if source.name in ("nvml", PROCESSES_SOURCE) else Weight.ADVICE
        why = f" ({source.message})" if source.message else ""
        do = next((do for part, do in _MENDS.items() if part in source.message), mends)
        yield weight, f"its agent's source {source.name} is {source.state}{why}: {costs}", do


def _told_elsewhere(source: Source, status: GPUNodeStatus) -> bool:
    plugin = status.plugin
    match source.name:
        case "kubelet" | "configz":
            return plugin.topology_manager_policy != ""
        case "plugin":
            read = plugin.allocation_policy != "unknown" and plugin.device_list_strategy != ""
            return read or ("GKE" in source.message and "labels" in plugin.source.split(","))
        case "labels":
            return "plugin" in plugin.source.split(",")
        case "gpm" | "nvml-process":  # which GPUs and drivers may not have
            return source.state == "absent"
    return False


def differing(status: GPUNodeStatus, version: str) -> Iterator[Said]:
    """Of agents that are not of the ``version`` that looks, where both are known."""
    if status.agent_version != version and {status.agent_version, version}.isdisjoint(UNKNOWN):
        yield (
            Weight.ADVICE,
            f"its agent is of version {status.agent_version}, and this doctor of {version}",
            "roll the same version out everywhere, agents and extenders",
        )


def ahead(ahead_s: float | None) -> Iterator[Said]:
    """Of a report from the future by ``ahead_s``; what is old may just be old."""
    if ahead_s is not None and ahead_s > CLOCKS_AGREE_S:
        yield (
            Weight.ADVICE,
            f"its clock is ahead of this machine's by {_round(ahead_s)}, as its newest report says",
            "set the clocks right (chrony, systemd-timesyncd), this machine's first; placing does "
            "not depend on them, but times in logs, events and reports are wrong",
        )


def _round(seconds: float) -> str:
    """Coarse, so that nodes that are off alike are told of together."""
    for unit_s, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"some {seconds / unit_s:.0f} {name}"
    return f"some {max(10, round(seconds, -1)):.0f} s"
