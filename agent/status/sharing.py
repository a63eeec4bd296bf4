"""Decides how each device is shared, from what the plugin told the kubelet. Pure.

The kubelet knows the healthy replicas of each resource and those that containers hold. A replica
that is missing among the healthy ones while others of its number are there is unhealthy. What is
held under a resource or a number that the plugin no longer advertises (it was renamed, or there are
fewer replicas now) takes no place among those it does: so the plugin counts, too.

Our own flags, where given, win; then the plugin's configuration, its answers to the kubelet, and
last the node's labels, which describe one model of several.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from agent.probes.pinning import pinning
from agent.probes.readings import (
    AnswerReading,
    Degraded,
    DeviceReading,
    HoldingReading,
    PluginReading,
    RegisteredReading,
    SharingReading,
    TopologyReading,
)
from agent.probes.replica_ids import parse, resolve
from contract.gpunode import MAX_REPLICAS, Device, Plugin, Replicas, Sharing

_T = TypeVar("_T")
Policy = Literal["distributed", "packed"]

#: Of sources that tell the same, the one that is believed.
_BY_TRUST = ("plugin", "labels")
#: A flag of the kubelet wins over its files, and those over the default.
_TOPOLOGY_BY_TRUST = ("configz", "k3s", "kubelet", "k3s-default")


@dataclass(frozen=True, slots=True)
class Share:
    """How one device is shared."""

    sharing: Sharing = "none"
    resource: str = ""
    replicas: Replicas = field(default_factory=Replicas)


@dataclass(frozen=True, slots=True)
class Told:
    """All that was told of sharing in one sample."""

    flags: SharingReading | None = None
    registered: Sequence[RegisteredReading] = ()
    holdings: Sequence[HoldingReading] = ()
    answers: Sequence[AnswerReading] = ()
    plugins: Sequence[PluginReading] = ()
    topologies: Sequence[TopologyReading] = ()


@dataclass(slots=True)
class _Counts:
    """Replicas of one resource."""

    shared: bool = False
    #: Of each device, where the plugin is well; 0 where that is not known.
    each: int = 0
    #: Device -> ids.
    healthy: dict[str, set[str]] = field(default_factory=dict)
    held: dict[str, set[str]] = field(default_factory=dict)


def shares(
    devices: Sequence[DeviceReading], told: Told, before: Mapping[str, Device]
) -> tuple[dict[str, Share], list[Degraded]]:
    """Device -> how it is shared, and what does not add up.

    ``before`` are the devices as last reported: one whose only replica is unhealthy is in nobody's
    list, but was.
    """
    counts = _counts(devices, told)
    found: dict[str, Share] = {}
    complaints: list[Degraded] = []
    for device in devices:
        if told.flags is not None and device.kind == "gpu":
            found[device.uuid] = _stated(device, told.flags, counts)
            continue
        last = before.get(device.uuid)
        resource = _resource(device, counts, last)
        if resource:
            found[device.uuid], more = _share(device, resource, counts[resource], told, last)
            complaints += more
        elif told.flags is not None:
            why = "resource of MIG devices is not known"
            complaints.append(Degraded(told.flags.source, why))
    return found, complaints + _strange(devices, told, counts, found)


def plugin(told: Told) -> Plugin:
    """The plugin's configuration; each part from the most trusted source that tells it."""
    readings = sorted(told.plugins, key=lambda r: _BY_TRUST.index(r.source))
    used: list[str] = [] if told.flags is None else [told.flags.source]

    def first(of: Iterable[tuple[str, _T | None]]) -> _T | None:
        for source, value in of:
            if value is not None:
                if source not in used:
                    used.append(source)
                return value
        return None

    policy: Policy | None = first([(r.source, r.allocation_policy) for r in readings])
    listed = [(r.source, r.device_list_strategy or None) for r in readings]
    answered = {answer.strategies: answer.source for answer in told.answers if answer.strategies}
    if len(answered) == 1:  # else some were given before a change
        listed += [(source, tuple(sorted(shown))) for shown, source in answered.items()]
    strategies = first(listed)
    rejects = first((r.source, r.fail_requests_greater_than_one) for r in readings)
    seen = next((r for r in readings if r.source == "plugin"), PluginReading(""))
    by_trust = sorted(told.topologies, key=lambda r: _TOPOLOGY_BY_TRUST.index(r.source))
    topology = first((r.source, r.policy) for r in by_trust)
    return Plugin(
        allocation_policy=policy or "unknown",
        device_list_strategy=",".join(strategies or ()),
        topology_manager_policy=topology or "",
        fail_requests_greater_than_one=rejects,
        pinning=pinning(strategies or (), seen.toolkit_obeys_environment, seen.passes_device_specs),
        source=",".join(used),
    )


def _counts(devices: Sequence[DeviceReading], told: Told) -> dict[str, _Counts]:
    """Resource -> its replicas, of all resources that have something to do with our devices."""
    ids = {replica for reading in told.registered for replica in reading.healthy}
    ids |= {holding.replica for holding in told.holdings}
    device_of = resolve(ids, devices)
    counts: dict[str, _Counts] = {}
    for reading in told.registered:
        count = counts.setdefault(reading.resource, _Counts())
        for replica in reading.healthy & device_of.keys():
            count.healthy.setdefault(device_of[replica], set()).add(replica)
    for holding in told.holdings:
        if holding.replica in device_of and holding.resource in counts:
            held = counts[holding.resource].held
            held.setdefault(device_of[holding.replica], set()).add(holding.replica)
    for resource, count in counts.items():
        # What is held may be of an earlier configuration, so it counts only while nothing is
        # registered: the plugin is about to come back.
        seen = count.healthy or count.held
        numbers = [parse(replica).number for ids in seen.values() for replica in ids]
        count.shared = any(number is not None for number in numbers)
        most = max((number + 1 for number in numbers if number is not None), default=0)
        stated = [(r.replicas or {}).get(resource, 0) for r in told.plugins]
        count.each = min(MAX_REPLICAS, max([most, *stated[:1]])) if count.shared else 1
    return counts


def _resource(device: DeviceReading, counts: Mapping[str, _Counts], last: Device | None) -> str:
    """The registered resource that the plugin advertises the device under; empty: none."""

    def weight(resource: str) -> tuple[int, int, bool, str]:
        count = counts[resource]
        return (
            len(count.healthy.get(device.uuid, ())),
            len(count.held.get(device.uuid, ())),
            last is not None and last.resource == resource,
            resource,
        )

    best = max(counts, key=weight, default="")
    return best if best and any(weight(best)[:3]) else ""


def _share(
    device: DeviceReading, resource: str, count: _Counts, told: Told, last: Device | None
) -> tuple[Share, list[Degraded]]:
    healthy = count.healthy.get(device.uuid, set())
    total = count.each
    if not count.healthy and last is not None and last.resource == resource:
        total = max(total, last.replicas.total)  # the plugin is away; it had as many
    allocated = len(healthy & count.held.get(device.uuid, set()))
    replicas = Replicas(
        free=len(healthy) - allocated,
        allocated=allocated,
        unhealthy=max(0, total - len(healthy)),
    )
    if not (count.shared or (last is not None and last.sharing != "none" and not count.healthy)):
        return Share("none", resource, replicas), []
    sharing = _kind(resource, told)
    if sharing is None and last is not None and last.sharing != "none":
        sharing = last.sharing
    if sharing is not None:
        return Share(sharing, resource, replicas), []
    why = "nobody tells whether replicas are shared by MPS or in time; taken for the latter"
    return Share("time-slicing", resource, replicas), [Degraded("plugin", why)]


def _kind(resource: str, told: Told) -> Sharing | None:
    """MPS or time-slicing, of a resource whose replicas are shared; None: nobody tells."""
    by_source = {r.source: r.sharing for r in told.plugins}
    answers = {answer.mps for answer in told.answers if answer.resource == resource}
    if by_source.get("plugin") in ("mps", "time-slicing"):
        return by_source["plugin"]
    if len(answers) == 1:
        return "mps" if answers.pop() else "time-slicing"
    if by_source.get("labels") in ("mps", "time-slicing"):
        return by_source["labels"]
    return None


def _stated(device: DeviceReading, flags: SharingReading, counts: Mapping[str, _Counts]) -> Share:
    """As our flags say; who holds what is still the kubelet's to tell."""
    count = counts.get(flags.resource, _Counts())
    allocated = min(flags.replicas, len(count.held.get(device.uuid, ())))
    free = flags.replicas - allocated
    return Share(flags.sharing, flags.resource, Replicas(free=free, allocated=allocated))


def _strange(
    devices: Sequence[DeviceReading],
    told: Told,
    counts: Mapping[str, _Counts],
    found: Mapping[str, Share],
) -> list[Degraded]:
    """What the sources tell that cannot all be so."""
    complaints: list[Degraded] = []
    well = any(count.healthy for count in counts.values())  # else the plugin is away
    device_of = resolve({holding.replica for holding in told.holdings}, devices)
    for holding in told.holdings:
        source = holding.source.partition(",")[0]
        ours = holding.resource.startswith(("nvidia.com/gpu", "nvidia.com/mig-"))
        if holding.replica not in device_of:
            if ours:
                why = f"{holding.resource} is held of devices that the driver does not list"
                complaints.append(Degraded(source, why))
        elif well and not _advertised(
            holding, found.get(device_of[holding.replica], Share()), counts
        ):
            why = f"{holding.resource} is held that the plugin no longer advertises"
            complaints.append(Degraded(source, why))
    labelled = {r.source: r.sharing for r in told.plugins}
    if len(labelled) == 2 and len(set(labelled.values())) == 2:
        complaints.append(Degraded("labels", "sharing is not that of the plugin's configuration"))
    return complaints


def _advertised(holding: HoldingReading, share: Share, counts: Mapping[str, _Counts]) -> bool:
    """Whether the plugin has such a replica, healthy or not."""
    count = counts.get(holding.resource)
    number = parse(holding.replica).number
    return (
        count is not None
        and holding.resource == share.resource
        and (number is not None) == count.shared
        and (number or 0) < count.each
    )
