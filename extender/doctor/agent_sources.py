"""Problems with a node's agent: failed sources, another version, a clock that is ahead.

The agent reports the state of each of its sources (docs/agent.md lists the message of every fault).
The rules here add what the failure costs and which mount, permission or setting fixes it. They skip
a source if another source reports the same facts, or if only some GPUs and drivers support it.
"""

from collections.abc import Iterator

from contract.gpunode import HOLDINGS_SOURCES, PROCESSES_SOURCE, GPUNodeStatus, Source
from extender.doctor.findings import PartialFinding, Weight

#: Smaller clock differences are ignored, because reports take time to be written and read.
CLOCKS_AGREE_S = 5.0

#: Versions that a process reports if it runs from a source checkout.
UNKNOWN = frozenset({"", "unknown"})

_HOST_PID = "set hostPID: true in the agent's DaemonSet"
_PTRACE = "add SYS_PTRACE to securityContext.capabilities.add of the agent's container"
_CHECKPOINT_MOUNT = (
    "mount the host directory /var/lib/kubelet/device-plugins into the agent's container, and "
    "allow the agent to read it"
)
_DRIVER = "check the driver (nvidia-smi and dmesg on the node), then restart the agent's pod"
_PROCESSES_UNSEEN = "memory use cannot be attributed to pods, and unattributed use is not measured"
_HOLDERS_INCOMPLETE = "which pod holds which replica is only partly known"
_POLICY_UNKNOWN = "the kubelet's topology manager policy is not known"
_SM_LESS_EXACT = "SM activity may be measured less exactly"
#: Name of a source -> what its failure costs, and the usual fix.
_FAILURES = {
    "nvml": (
        "memory or utilization of some GPUs is not measured",
        "check the driver (nvidia-smi on the node); if the agent's container lacks a permission, "
        "run it as root",
    ),
    PROCESSES_SOURCE: (_PROCESSES_UNSEEN, f"{_PTRACE}, and run the container as root"),
    "checkpoint": (_HOLDERS_INCOMPLETE, _CHECKPOINT_MOUNT),
    "podresources": (
        _HOLDERS_INCOMPLETE,
        "mount the host directory /var/lib/kubelet/pod-resources into the agent's container, and "
        "allow the agent to use the socket in it; if the socket does not answer, check the "
        "kubelet's log",
    ),
    "plugin": (
        "how the device plugin shares and allocates GPUs may not be known",
        "check the log of the device plugin's pod on the node",
    ),
    "labels": (
        "the node's sharing labels are not compared with the device plugin's configuration",
        "allow the agent to get its node (deploy/base/rbac.yaml: nodes, get)",
    ),
    "kubelet": (_POLICY_UNKNOWN, _HOST_PID),
    "configz": (
        _POLICY_UNKNOWN,
        "allow the agent to get nodes/proxy, or set hostPID: true in its DaemonSet",
    ),
    "mirrors": (
        "memory use of static pods may be counted as unattributed",
        "allow the agent to get pods",
    ),
    "xid": ("XID errors of the GPUs are not recorded", _DRIVER),
    "gpm": (_SM_LESS_EXACT, _DRIVER),
    "nvml-process": (_SM_LESS_EXACT, _DRIVER),
    "dcgm": (
        f"{_SM_LESS_EXACT}, and NVML's memory readings are not checked",
        "check the dcgm-exporter's pod on the node, and the agent's address for it "
        "(HEADROOM_DCGM_URL)",
    ),
}
#: Part of an agent's message -> the fix, if it differs from the usual fix for the source.
_FIXES_BY_MESSAGE = {
    "hostPID": _HOST_PID,
    "MIG": (
        "add component deploy/components/mig (Helm: agent.mig: true), or create MIG instances, or "
        "turn MIG off"
    ),
    "no device plugin listens": (
        "check whether the device plugin's pod runs on the node, and check its log"
    ),
    "no kubelet listens": "check whether the kubelet runs on the node, and check its log",
    "k3s hides": (
        "set topologyManagerPolicy in a file of /var/lib/rancher/k3s/agent/etc/kubelet.conf.d, or "
        "allow the agent to get its node"
    ),
    "there is no checkpoint": _CHECKPOINT_MOUNT,
    "several processes listen": "run only one device plugin on the node",
    "CAP_SYS_PTRACE": _PTRACE,
    "headroom.gpu/maintenance": (
        "when the work on the driver is done, remove the annotation: "
        "kubectl annotate node NAME headroom.gpu/maintenance-"
    ),
    "nvidia.com/gpu.deploy": "wait for the GPU Operator; see its driver and MIG managers' pods",
    "agent's own cgroup": "take the GPU memory limit off the agent's pod",
    "not what NVML reports": "see whether dcgm-exporter's pod there is stuck, and restart it",
}


def source_findings(status: GPUNodeStatus) -> Iterator[PartialFinding]:
    """Yield a finding for each failed source whose facts no other source reports."""
    failed = [source for source in status.sources if source.state != "ok"]
    counted = any(device.replicas.total for device in status.devices)
    no_holders = {source.name for source in failed} >= HOLDINGS_SOURCES and not counted
    if no_holders:
        yield (
            Weight.WARNING,
            "neither the kubelet's checkpoint nor its PodResources can be read: which pod holds "
            "which replica is not known, and no replica of the node counts as free",
            f"{_CHECKPOINT_MOUNT}; do the same for /var/lib/kubelet/pod-resources",
        )
    for source in failed:
        if source.name not in _FAILURES or (no_holders and source.name in HOLDINGS_SOURCES):
            continue
        if _is_covered(source, status):
            continue
        cost, fix = _FAILURES[source.name]
        weight = Weight.WARNING if source.name in ("nvml", PROCESSES_SOURCE) else Weight.ADVICE
        detail = f" ({source.message})" if source.message else ""
        specific = (do for part, do in _FIXES_BY_MESSAGE.items() if part in source.message)
        found = f"the agent's source {source.name} is {source.state}{detail}: {cost}"
        yield weight, found, next(specific, fix)


def _is_covered(source: Source, status: GPUNodeStatus) -> bool:
    """Return whether the report has the source's facts from elsewhere, or can do without them."""
    plugin = status.plugin
    match source.name:
        case "kubelet" | "configz":
            return plugin.topology_manager_policy != ""
        case "plugin":
            is_known = plugin.allocation_policy != "unknown" and plugin.device_list_strategy != ""
            return is_known or ("GKE" in source.message and "labels" in plugin.source.split(","))
        case "labels":
            return "plugin" in plugin.source.split(",")
        case "gpm" | "nvml-process":  # not every GPU and driver supports these
            return source.state == "absent"
    return False


def version_findings(status: GPUNodeStatus, version: str) -> Iterator[PartialFinding]:
    """Yield a finding if the agent's version differs from the doctor's ``version``.

    Unknown versions are not compared.
    """
    if status.agent_version != version and {status.agent_version, version}.isdisjoint(UNKNOWN):
        yield (
            Weight.ADVICE,
            f"the agent has version {status.agent_version}, and this doctor has version {version}",
            "deploy the same version of all agents and extenders",
        )


def clock_findings(ahead_s: float | None) -> Iterator[PartialFinding]:
    """Yield a finding if the newest report is dated ``ahead_s`` seconds in the future.

    A report from the past proves nothing about the clock: it may just be old.
    """
    if ahead_s is not None and ahead_s > CLOCKS_AGREE_S:
        yield (
            Weight.ADVICE,
            f"the node's clock is ahead of this machine's by {_coarse(ahead_s)}, according to its "
            "newest report",
            "synchronize the clocks (chrony, systemd-timesyncd), this machine's first; scheduling "
            "does not depend on them, but times in logs, events and reports are wrong",
        )


def _coarse(seconds: float) -> str:
    """Return a duration as text, rounded so that nodes with similar offsets share one finding."""
    for unit_s, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"about {seconds / unit_s:.0f} {name}"
    return f"about {max(10, round(seconds, -1)):.0f} s"
