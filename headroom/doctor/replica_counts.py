"""Advises how many replicas devices should have, from the amounts of memory that pods request.

The pods are the existing pods and, if the console can be read, the pods of the last hours. Under
``distributed``, too many replicas waste no memory, because memory runs out first. Too few replicas
waste much, because small pods find no free replica although memory is free. So there must be enough
replicas for a device that is full of small pods. The lower quartile of the requests counts as a
small pod. Under ``packed``, the device plugin prefers a full device until all its replicas are
allocated, so the number of replicas should be the number of typical pods that fit on the
device (docs/design/device-choice.md).

A device that is not shared needs replicas if several of the waiting pods would fit on it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from zlib import crc32

from headroom.contract.annotations import PPM, VRAM, Amount, Bytes, Share
from headroom.contract.commands import command, commented
from headroom.contract.gpunode import Plugin
from headroom.doctor.findings import PartialFinding, Weight
from headroom.doctor.sharing_rules import FEWEST_REPLICAS, NodeFacts, Typical, rounded

#: A device has too few replicas if their number is below this ratio of the number of small pods
#: that fit on it.
TOO_FEW_RATIO = 0.75
#: Requests count as similar if N median pods fill at least this ratio of a device, where N is the
#: number of pods of the largest size that fit on it.
ALIKE_RATIO = 0.8
#: By default, the kubelet runs at most this many pods, so it never uses more replicas of a device.
MAX_REPLICAS = 110
#: Suffix that the device plugin adds to a shared resource if ``renameByDefault`` is set.
SHARED = ".shared"
#: Maximum length of a label's value.
MAX_LABEL = 63


@dataclass(frozen=True, slots=True)
class Advice:
    """The advised number of replicas of one resource of a node."""

    resource: str
    count: int
    #: The reason for this number of replicas.
    found: str
    #: Another effect of this number of replicas, or empty.
    effect: str = ""


def advise(facts: NodeFacts) -> Iterator[Advice]:
    """Yield advice for each kind of device whose replicas do not match the pods."""
    yield from _other_counts(facts)
    if facts.node.reason is None:
        yield from _to_share(facts)


def _to_share(facts: NodeFacts) -> Iterator[Advice]:
    """Advise to share a device if several of the waiting pods would fit on it."""
    for resource, allocatable_bytes in {
        (t.device.resource, t.allocatable_bytes) for t in facts.unshared
    }:
        waiting = facts.waiting.get(resource, Counter())
        sizes = sorted(_bytes_of(amount, allocatable_bytes) for amount in waiting.elements())
        sizes = [size for size in sizes if 2 * size <= allocatable_bytes]
        if len(sizes) >= FEWEST_REPLICAS:
            small = sizes[(len(sizes) - 1) // 4]
            yield Advice(
                resource,
                min(MAX_REPLICAS, allocatable_bytes // max(1, small)),
                f"each {resource} device of {rounded(allocatable_bytes)} is not shared, so it runs "
                f"one pod; {len(sizes)} GPU containers that wait request {rounded(sizes[-1])} or "
                "less",
                ": pods then share it by time-slicing, and a pod that needs all of its memory "
                f"requests {VRAM}: 100%",
            )


def _bytes_of(amount: Amount, allocatable_bytes: int) -> int:
    match amount:
        case Bytes(count_bytes):
            return count_bytes
        case Share(ppm):
            return allocatable_bytes * ppm // PPM
    return allocatable_bytes


def _other_counts(facts: NodeFacts) -> Iterator[Advice]:
    """Yield advice for each kind of time-sliced device whose replicas do not match the pods."""
    for resource, replicas, allocatable_bytes, policy in {
        (t.device.resource, t.device.replicas.total, t.allocatable_bytes, t.policy)
        for t in facts.sliced
    }:
        typical = facts.recent.get(resource)
        if typical is None:
            continue
        containers = f"{typical.containers} GPU containers ({_basis(typical)})"

        def fitting(size_bytes: int, whole_bytes: int = allocatable_bytes) -> int:
            return max(FEWEST_REPLICAS, whole_bytes // max(1, size_bytes))

        device = f"each {resource} device of {rounded(allocatable_bytes)} has {replicas} replicas"
        found = (
            f"{device}, and at least half of {containers} request {rounded(typical.median)} or more"
        )
        slots = allocatable_bytes // max(1, typical.largest)
        is_similar = slots * typical.median >= ALIKE_RATIO * allocatable_bytes
        if policy == "packed":
            if replicas > (count := fitting(typical.median)):
                yield Advice(
                    resource,
                    count,
                    f"{found}: a full device stays the next choice while it has free replicas",
                )
            elif replicas < TOO_FEW_RATIO * (count := min(MAX_REPLICAS, count)):
                yield Advice(resource, count, f"{found}: replicas run out before memory does")
        elif replicas < TOO_FEW_RATIO * (count := min(MAX_REPLICAS, fitting(typical.small))):
            yield Advice(
                resource,
                count,
                f"{device}, and at least a quarter of {containers} request "
                f"{rounded(typical.small)} or less: replicas run out before memory does",
            )
        elif is_similar and FEWEST_REPLICAS <= slots < replicas:
            yield Advice(
                resource,
                slots,
                f"{found}, none more than {rounded(typical.largest)}",
                ": then no pod requests more than a replica's share, and no choice of the device "
                "plugin can overcommit memory",
            )


def _basis(typical: Typical) -> str:
    """Describe which pods were counted, such as "from 8 pods that exist now"."""
    pods = "1 pod" if typical.pods == 1 else f"{typical.pods} pods"
    if not typical.span_s:
        return f"from {pods} that exist now"
    hours = typical.span_s / 3600
    span = f"{hours:.1f} h" if hours >= 1 else f"{ceil(60 * hours)} min"
    return f"from {pods} that exist now or came in the last {span}"


def replica_counts(facts: NodeFacts) -> Iterator[PartialFinding]:
    """Compare the number of replicas with the number that the pods need."""
    for advice in advise(facts):
        yield (
            Weight.ADVICE,
            advice.found,
            f"set replicas: {advice.count} in the device plugin's configuration (headroom doctor "
            f"--plugin-config prints it){advice.effect}",
        )


def plugin_config(nodes: Iterable[NodeFacts]) -> str:
    """Return a ConfigMap of NVIDIA's device plugin with the advised replicas, as YAML.

    It has one configuration for each different advice, with the nodes and the commands in comments.
    It is empty if no node needs another number of replicas. A configuration lists all time-sliced
    resources of its nodes, because it replaces their current configuration.
    """
    names_of: dict[_Sharing, list[str]] = {}
    reasons: dict[_Sharing, set[str]] = {}
    for facts in nodes:
        advised: dict[str, int] = {}
        found = list(advise(facts))
        for advice in found:
            advised[advice.resource] = max(advice.count, advised.get(advice.resource, 0))
        if not advised:
            continue
        present = {t.device.resource: t.device.replicas.total for t in facts.sliced}
        plugin = facts.status.plugin if facts.status is not None else Plugin()
        sharing = _Sharing(
            counts=tuple(sorted({**present, **advised}.items())),
            several=plugin.steers_several and not plugin.fail_requests_greater_than_one,
        )
        names_of.setdefault(sharing, []).append(facts.node.name)
        reasons.setdefault(sharing, set()).update(advice.found for advice in found)
    if not names_of:
        return ""
    lines = [
        "# Sharing configuration of NVIDIA's device plugin, with the replicas that match the pods.",
        "# Merge it into the ConfigMap that the plugin uses (Helm value config.name; GPU Operator:",
        "# devicePlugin.config.name). Other settings of the plugin are not shown here. The plugin",
        "# restarts when the label of its node changes: drain the node first.",
        "apiVersion: v1",
        "kind: ConfigMap",
        "metadata:",
        "  name: nvidia-device-plugin-configs",
        "data:",
    ]
    for sharing, names in names_of.items():
        lines += [f"  # {reason}." for reason in sorted(reasons[sharing])]
        label = f"nvidia.com/device-plugin.config={sharing.key}"
        words = "label", "--overwrite", "node", *sorted(names), label
        lines.append(f"  {commented(command('kubectl', *words))}")
        lines += [f"  {sharing.key}: |", *(f"    {line}" for line in sharing.lines())]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class _Sharing:
    """A configuration of the device plugin."""

    #: Replicas by resource.
    counts: tuple[tuple[str, int], ...]
    #: Whether containers may request several replicas, which steered nodes place on different GPUs.
    several: bool

    @property
    def key(self) -> str:
        """The name of the configuration.

        It contains the counts, so new counts lead to a new name. This is needed because the plugin
        notices a changed label but not a changed ConfigMap.
        """
        parts = [f"{resource.rpartition('/')[2]}-{count}" for resource, count in self.counts]
        text = "_".join([*parts, *(["several"] if self.several else [])])
        return text if len(text) <= MAX_LABEL else f"replicas-{crc32(text.encode()):08x}"

    def lines(self) -> list[str]:
        renamed = any(resource.endswith(SHARED) for resource, _ in self.counts)
        rejects = "false" if self.several else "true"
        lines = ["version: v1", "sharing:", "  timeSlicing:"]
        lines += ["    renameByDefault: true"] if renamed else []
        lines += [f"    failRequestsGreaterThanOne: {rejects}", "    resources:"]
        for resource, count in self.counts:
            lines += [f"    - name: {resource.removesuffix(SHARED)}", f"      replicas: {count}"]
        return lines
