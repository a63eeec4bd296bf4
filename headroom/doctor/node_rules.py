"""Rules of the doctor about nodes: what costs the cluster safety or memory, and what to do.

Each rule examines one node and yields its findings.

The agent reports the state of each of its sources (docs/design/agent.md lists the message of every
fault). The rules add what the failure costs, and which mount, permission or setting fixes it. They
skip a source if another source reports the same facts, or if only some GPUs and drivers support it.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from headroom.contract.annotations import CORDON, DEVICE_CHOICE, DeviceChoice, parse_cordon
from headroom.contract.commands import command
from headroom.contract.gpunode import (
    HOLDINGS_SOURCES,
    PROCESSES_SOURCE,
    GPUNodeStatus,
    Source,
    SourceCode,
)
from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason
from headroom.contract.timestamps import age
from headroom.contract.vramprofile import VRAMProfile
from headroom.contract.watched import Relisted, WatchEvent
from headroom.core.cluster.changes import GpuUsersSeen
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.trackers.gpu_users import gpu_users
from headroom.core.placement.snapshot_builder import reach
from headroom.doctor.findings import Finding, PartialFinding, Weight, warnings_first, with_nodes
from headroom.doctor.pod_rules import (
    examine_overuse,
    examine_starts,
    examine_steering,
    examine_users,
)
from headroom.doctor.recent_requests import NO_RECENT, RecentRequests
from headroom.doctor.recommendation_rule import examine_recommendations
from headroom.doctor.replica_counts import plugin_config, replica_counts
from headroom.doctor.resource_rules import examine_resources
from headroom.doctor.sharing_rules import SHARING_RULES, NodeFacts, gpu_requests, typical_requests
from headroom.doctor.waiting_pods import WaitingPods
from headroom.runtime.settings.settings import Settings
from headroom.version import own_version


def examine_nodes(
    settings: Settings,
    events: Sequence[WatchEvent],
    recent: RecentRequests = NO_RECENT,
    profiles: Sequence[VRAMProfile] = (),
) -> list[Finding]:
    """Examine the nodes and pods of the cluster that ``events`` describe."""
    state = state_of(settings, events)
    found = examine(state, time.monotonic(), own_version(), recent)
    return [*found, *examine_recommendations(state, profiles, time.time())]


def advised_plugin_config(
    settings: Settings, events: Sequence[WatchEvent], recent: RecentRequests = NO_RECENT
) -> str:
    """Return the result of ``plugin_config`` for the nodes of the cluster in ``events``."""
    return plugin_config(_facts(state_of(settings, events), time.monotonic(), "", recent))


def state_of(settings: Settings, events: Sequence[WatchEvent]) -> Cluster:
    """Return the state of the cluster that ``events`` describe."""
    writer = ClusterWriter(settings.rules, settings.stale_after_s, time.time() - time.monotonic())
    writer.apply(events)
    cluster = writer.cluster
    objects = (each for event in events if isinstance(event, Relisted) for each in event.objects)
    pods = (each for each in objects if isinstance(each, Pod))
    others = (pod for pod in pods if cluster.pod(pod.metadata.uid) is None)
    writer.apply([GpuUsersSeen(gpu_users(cluster.gpunodes(), others))])
    return cluster


def examine(
    state: Cluster, now_s: float, version: str = "", recent: RecentRequests = NO_RECENT
) -> list[Finding]:
    """Apply all rules to all GPU nodes. Return the findings, warnings first.

    ``now_s`` is the time of this process's monotonic clock. ``version`` is the version of this
    package, with which the agents' versions are compared.
    """
    nodes_of: dict[PartialFinding, list[str]] = {}
    for facts in _facts(state, now_s, version, recent):
        for rule in _RULES:
            for finding in rule(facts):
                nodes_of.setdefault(finding, []).append(facts.node.name)
    found = [*with_nodes(nodes_of), *examine_resources(state), *examine_steering(state, now_s)]
    found += [*examine_overuse(state, now_s), *examine_starts(state), *examine_users(state)]
    return warnings_first(found)


def _facts(
    state: Cluster, now_s: float, version: str, recent: RecentRequests
) -> Iterator[NodeFacts]:
    """Yield the facts of each node that has managed GPU resources, by name."""
    requests = gpu_requests(state)
    typical = typical_requests(requests)
    counted = typical_requests(recent.beside(requests), recent.span_s)
    unannotated = Counter(each.resource for each in requests if not each.is_annotated)
    waiting = WaitingPods(state)
    for terms in sorted(state.snapshot().nodes, key=lambda node: node.name):
        node = state.node(terms.name)
        offers = node.status.allocatable if node and node.status else None
        if node is None or terms.by_dra:
            continue  # a GPUNode without its Node, or a node where DRA allocates the GPUs
        offers_gpus = any(state.rules.manages(name) for name in offers or ())
        if not offers_gpus and terms.reason is not Reason.DRA_AND_PLUGIN:
            continue  # a node without managed GPU resources
        yield NodeFacts(
            terms,
            node.metadata.annotations or {},
            state.report(terms.name, state.gpunode(terms.name)),
            terms.fresh_until_s < now_s,
            _age_s(state, terms.name, now_s),
            version,
            typical,
            counted,
            unannotated,
            waiting.on(node),
        )


def _age_s(state: Cluster, name: str, now_s: float) -> float | None:
    """Return the age of the node's newest report or heartbeat, or None if it has neither.

    The timestamp comes from the node's clock, and the current time from this machine's clock. So if
    the node's clock is ahead, the age is negative.
    """
    gpunode, confirmation = state.gpunode(name), state.confirmation(name)
    stamps = [gpunode.status.observed_at if gpunode and gpunode.status else ""]
    stamps += [confirmation.sampled_at] if confirmation else []
    ages_s = [age(stamp, state.epoch_s + now_s) for stamp in stamps]
    return min((age_s for age_s in ages_s if age_s is not None), default=None)


def _takes_no_pods(facts: NodeFacts) -> Iterator[PartialFinding]:
    """Report why the node takes no pods, or no pods that share a GPU."""
    reason = facts.node.reason
    if reason is None and facts.stale and not _from_the_future(facts):
        reason = Reason.STALE_REPORT
    if reason is None:
        return
    if reason is Reason.BAD_NODE_ANNOTATION:
        yield Weight.WARNING, f"takes no pods: {facts.node.detail}", reason.remedy
        return
    detail = f" ({facts.node.detail})" if facts.node.detail else ""
    found = f"takes no pods that share a GPU: {reason.sentence}{detail}"
    yield Weight.WARNING, found, reason.remedy


def _from_the_future(facts: NodeFacts) -> bool:
    """Return whether the newest report is dated in the future.

    The doctor reads the cluster only once, so it cannot see whether the report changes. Such a
    report therefore counts as stale, but the actual problem is the node's clock.
    """
    return facts.age_s is not None and facts.age_s < -CLOCKS_AGREE_S


def _not_steered(facts: NodeFacts) -> Iterator[PartialFinding]:
    steered = facts.annotations.get(DEVICE_CHOICE, "").strip() == DeviceChoice.STEERED.value
    if steered and facts.node.reason is None and facts.node.detail:
        yield (
            Weight.WARNING,
            f"{facts.node.detail}; pods are placed there as on any other node",
            f"remove the obstacle, or the annotation: kubectl annotate node NAME {DEVICE_CHOICE}-",
        )


def _cordoned(facts: NodeFacts) -> Iterator[PartialFinding]:
    """Report cordoned devices that close other devices, and names of devices that do not exist."""
    if facts.node.reason is not None:
        return
    cordoned = parse_cordon(facts.annotations.get(CORDON, ""))
    known = {each.device.uuid for each in facts.node.devices}
    known |= {each.device.parent or "" for each in facts.node.devices}
    if unknown := sorted(cordoned - known):
        yield (
            Weight.WARNING,
            f"annotation {CORDON} names {', '.join(unknown)}, which is no GPU of the node",
            f"{command('kubectl', 'headroom', 'uncordon', 'NAME', unknown[0])}; "
            "kubectl headroom top gpu lists the GPUs of the node",
        )
    closing = [
        each.device.uuid for each in facts.node.devices if each.cordoned and reach(each) == 1
    ]
    if closing and len(closing) < len(facts.node.devices):
        yield (
            Weight.ADVICE,
            f"GPU {closing[0]} is cordoned and the device plugin's next choice, so the other GPUs "
            "take no pods of its resource either",
            f"let Headroom choose the GPU: kubectl annotate node NAME {DEVICE_CHOICE}=steered, or "
            f"uncordon it: {command('kubectl', 'headroom', 'uncordon', 'NAME', closing[0])}",
        )


def _compute_mode(facts: NodeFacts) -> Iterator[PartialFinding]:
    modes = sorted(
        {each.device.compute_mode for each in facts.node.devices if each.device.is_closed_by_mode}
    )
    for mode in modes:
        pods = "pods" if mode == "prohibited" else "pods that share them by time slicing"
        yield (
            Weight.WARNING,
            f"GPUs have compute mode {mode}, so {pods} fail, and Headroom places none there",
            "on the node: nvidia-smi -i GPU -c DEFAULT; kubectl headroom top gpu --troubled lists "
            "the GPUs. Only MPS needs mode exclusive-process",
        )


def _unmeasured(facts: NodeFacts) -> Iterator[PartialFinding]:
    if facts.node.reason is None and facts.node.unmeasured:
        yield (
            Weight.WARNING,
            "pods are placed by the node's labels alone: unattributed use of its GPUs is not "
            "measured",
            "run the agent on the node",
        )


#: Smaller clock differences are ignored, because reports take time to be written and read.
CLOCKS_AGREE_S = 5.0

#: Versions reported by a process that runs from a source checkout.
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
#: Cause of missing data -> the fix, for causes that need another fix than usual. The first
#: matching entry counts.
_FIXES: Mapping[SourceCode, str] = {
    "no_host_pid": _HOST_PID,
    "gpu_not_listed": (
        "wait a minute: the agent opens the driver again if the kernel has another number of GPUs. "
        "If it stays, delete the agent's pod on the node, and check the GPU (nvidia-smi)"
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
    """Return whether the report has the source's facts from elsewhere, or does not need them."""
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


def _failed_sources(facts: NodeFacts) -> Iterator[PartialFinding]:
    if facts.status is not None and not facts.node.unmeasured:
        yield from source_findings(facts.status)


def _version(facts: NodeFacts) -> Iterator[PartialFinding]:
    """Compare the agent's version with the doctor's version, if both are known."""
    if facts.status is None:
        return
    agent, doctor = facts.status.agent_version, facts.version
    if agent != doctor and {agent, doctor}.isdisjoint(UNKNOWN):
        yield (
            Weight.ADVICE,
            f"the agent has version {agent}, and this doctor has version {doctor}",
            "deploy the same version of all agents and extenders",
        )


def _clock(facts: NodeFacts) -> Iterator[PartialFinding]:
    """Report a clock that is ahead. A clock that is behind looks the same as an old report."""
    if facts.age_s is not None and _from_the_future(facts):
        yield (
            Weight.ADVICE,
            f"the node's clock is ahead of this machine's by {_coarse(-facts.age_s)}, according to "
            "its newest report",
            "synchronize the clocks (chrony, systemd-timesyncd), this machine's first; scheduling "
            "does not depend on them, but times in logs, events and reports are wrong",
        )


def _coarse(seconds: float) -> str:
    """Return a duration as rounded text, so that nodes with similar offsets share one finding."""
    for unit_s, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"about {seconds / unit_s:.0f} {name}"
    return f"about {max(10, round(seconds, -1)):.0f} s"


_RULES: tuple[Callable[[NodeFacts], Iterator[PartialFinding]], ...] = (
    _takes_no_pods,
    _not_steered,
    _cordoned,
    _compute_mode,
    _unmeasured,
    _failed_sources,
    _version,
    _clock,
    *SHARING_RULES,
    replica_counts,
)
