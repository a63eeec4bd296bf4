"""The doctor's rule about the agent's sources.

The agent reports the state of each of its sources (docs/design/agent.md lists the message of every
fault). The rule adds the consequence of the failure, and the mount, permission or setting that
fixes it. It skips a source if another source reports the same facts, or if only some GPUs and
drivers support the source.
"""

from collections.abc import Iterator, Mapping

from headroom.contract.gpunode import (
    HOLDINGS_SOURCES,
    PROCESSES_SOURCE,
    GPUNodeStatus,
    Source,
    SourceCode,
)
from headroom.doctor.findings import PartialFinding, Weight

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
#: Maps the name of a source to the consequence of its failure, and the usual fix.
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
        _SM_LESS_EXACT,
        "check the dcgm-exporter's pod on the node, and the agent's address for it "
        "(HEADROOM_DCGM_URL)",
    ),
}
#: Maps the cause of a failure to its fix, if this is not the usual fix. The first entry whose cause
#: the source reports counts.
_FIXES: Mapping[SourceCode, str] = {
    "no_host_pid": _HOST_PID,
    "gpu_not_listed": (
        "wait a minute: the agent opens the driver again if the kernel has another number of GPUs. "
        "If this does not help, delete the agent's pod on the node, and check the GPU (nvidia-smi)"
    ),
    "mig": (
        "add component deploy/components/mig (Helm: agent.mig: true), or create MIG instances, or "
        "turn MIG off"
    ),
    "no_device_plugin": (
        "check whether the device plugin's pod runs on the node, and check its log"
    ),
    "no_kubelet": "check whether the kubelet runs on the node, and check its log",
    "k3s": (
        "set topologyManagerPolicy in a file of /var/lib/rancher/k3s/agent/etc/kubelet.conf.d, or "
        "allow the agent to get its node"
    ),
    "no_checkpoint": _CHECKPOINT_MOUNT,
    "several_listeners": "run only one device plugin on the node",
    "no_ptrace": _PTRACE,
    "maintenance": (
        "when the work on the driver is done, remove the annotation: "
        "kubectl annotate node NAME headroom.gpu/maintenance-"
    ),
    "gpu_operator": "wait for the GPU Operator; see its driver and MIG managers' pods",
    "no_cgroups": "mount the host's /sys/fs/cgroup into the agent's container",
}


def source_findings(status: GPUNodeStatus) -> Iterator[PartialFinding]:
    """Yield a finding for each failed source whose facts no other source reports."""
    failed = [source for source in status.sources if source.state != "ok"]
    replicas_known = any(device.replicas.total for device in status.devices)
    holders_unknown = {source.name for source in failed} >= HOLDINGS_SOURCES and not replicas_known
    if holders_unknown:
        yield (
            Weight.WARNING,
            "neither the kubelet's checkpoint nor its PodResources can be read: which pod holds "
            "which replica is not known, and no replica of the node counts as free",
            f"{_CHECKPOINT_MOUNT}; do the same for /var/lib/kubelet/pod-resources",
        )
    for source in failed:
        if source.name not in _FAILURES or (holders_unknown and source.name in HOLDINGS_SOURCES):
            continue
        if _is_covered(source, status):
            continue
        cost, fix = _FAILURES[source.name]
        weight = Weight.WARNING if source.name in ("nvml", PROCESSES_SOURCE) else Weight.ADVICE
        detail = f" ({source.message})" if source.message else ""
        specific = (do for code, do in _FIXES.items() if code in source.codes)
        found = f"the agent's source {source.name} is {source.state}{detail}: {cost}"
        yield weight, found, next(specific, fix)


def _is_covered(source: Source, status: GPUNodeStatus) -> bool:
    """Return whether another source provides the same facts, or whether they are not needed."""
    plugin = status.plugin
    match source.name:
        case "kubelet" | "configz":
            return plugin.topology_manager_policy != ""
        case "plugin":
            is_known = plugin.allocation_policy != "unknown" and plugin.device_list_strategy != ""
            return is_known or ("gke_plugin" in source.codes and "labels" in plugin.source)
        case "labels":
            return "plugin" in plugin.source.split(",")
        case "gpm" | "nvml-process":  # not every GPU and driver supports these sources
            return source.state == "absent"
    return False
