"""Rules of the doctor about nodes. Each rule examines one node and yields its findings.

``doctor.source_rules`` has the rule about the agent's sources.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from headroom.contract.annotations import CORDON, DEVICE_CHOICE, DeviceChoice, parse_cordon
from headroom.contract.commands import command
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
    examine_several,
    examine_starts,
    examine_steering,
    examine_users,
)
from headroom.doctor.recent_requests import NO_RECENT, RecentRequests
from headroom.doctor.recommendation_rule import examine_recommendations
from headroom.doctor.replica_counts import plugin_config, replica_counts
from headroom.doctor.resource_rules import examine_resources
from headroom.doctor.sharing_rules import SHARING_RULES, NodeFacts, gpu_requests, typical_requests
from headroom.doctor.source_rules import source_findings
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
    found += examine_several(state, now_s)
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
    """Report cordoned devices because of which other devices take no pods, and names in the
    annotation that match no device."""
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
