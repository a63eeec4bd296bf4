"""Decides how each device is shared, from the replicas that the plugin registered. Pure.

The kubelet reports the healthy replicas of each resource, and the replicas that containers hold.
Every device of a resource has the same number of replicas, so if a device has fewer than others,
the missing replicas are unhealthy. Containers may hold replicas that are no longer advertised,
because the resource was renamed or has fewer replicas now. Such replicas do not count as allocated.

The sources, in order of priority, are the agent's flags, the plugin's configuration, the plugin's
responses to the kubelet, and the node's labels. Labels come last, because on a node with several
GPU models they describe only one model.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from agent.probes.cause import Cause
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
from headroom.contract.gpunode import MAX_REPLICAS, MAX_WORD, Device, Plugin, Replicas, Sharing

_T = TypeVar("_T")
Policy = Literal["distributed", "packed"]

#: Prefixes of the names of resources whose replicas belong to GPUs.
_GPU_RESOURCES = ("nvidia.com/gpu", "nvidia.com/mig-")
#: Sources of the plugin's configuration by priority, highest first.
_BY_TRUST = ("plugin", "labels")
#: Sources of the topology policy by priority. Flags override files, and files override the default.
_TOPOLOGY_BY_TRUST = ("configz", "k3s", "kubelet", "k3s-default")


@dataclass(frozen=True, slots=True)
class Share:
    """How one device is shared."""

    sharing: Sharing = "none"
    resource: str = ""
    replicas: Replicas = field(default_factory=Replicas)


@dataclass(frozen=True, slots=True)
class SharingReadings:
    """All readings of one sample about sharing."""

    flags: SharingReading | None = None
    registered: Sequence[RegisteredReading] = ()
    holdings: Sequence[HoldingReading] = ()
    answers: Sequence[AnswerReading] = ()
    plugins: Sequence[PluginReading] = ()
    topologies: Sequence[TopologyReading] = ()


@dataclass(slots=True)
class _Counts:
    """The replicas of one resource."""

    shared: bool = False
    #: Number of replicas, healthy or not, of each device of the resource, or 0 if unknown.
    per_device: int = 0
    #: Ids of the healthy replicas, by device.
    healthy: dict[str, set[str]] = field(default_factory=dict)
    #: Ids of the replicas that containers hold, by device.
    held: dict[str, set[str]] = field(default_factory=dict)


def shares(
    devices: Sequence[DeviceReading], readings: SharingReadings, before: Mapping[str, Device]
) -> tuple[dict[str, Share], list[Degraded]]:
    """Return how each device is shared, and the contradictions between sources.

    ``before`` contains the devices of the last report by UUID. It is needed while no source lists
    the replicas of a device, because they are unhealthy or the plugin is down.
    """
    counts = _counts(devices, readings)
    found: dict[str, Share] = {}
    complaints: list[Degraded] = []
    for device in devices:
        if readings.flags is not None and device.kind == "gpu":
            found[device.uuid] = _stated(device, readings.flags, counts)
            continue
        last = before.get(device.uuid)
        resource = _resource(device, counts, last)
        if resource:
            found[device.uuid], more = _share(device, resource, counts[resource], readings, last)
            complaints += more
        elif readings.flags is not None:
            why = "resource of MIG devices is unknown"
            complaints.append(Degraded(readings.flags.source, why))
    return found, complaints + _contradictions(devices, readings, counts, found)


def plugin(readings: SharingReadings) -> Plugin:
    """Return the plugin's configuration. Each part comes from the source with the highest
    priority."""
    plugins = sorted(readings.plugins, key=lambda r: _BY_TRUST.index(r.source))
    used: list[str] = [] if readings.flags is None else [readings.flags.source]

    def first(of: Iterable[tuple[str, _T | None]]) -> _T | None:
        """Return the first value that is known, and record its source."""
        for source, value in of:
            if value is not None:
                if source not in used:
                    used.append(source)
                return value
        return None

    policy: Policy | None = first([(r.source, r.allocation_policy) for r in plugins])
    listed = [(r.source, r.device_list_strategy or None) for r in plugins]
    answered = {
        answer.strategies: answer.source for answer in readings.answers if answer.strategies
    }
    if len(answered) == 1:  # If the responses differ, some are older than a configuration change.
        listed += [(source, tuple(sorted(shown))) for shown, source in answered.items()]
    strategies = first(listed)
    rejects = first((r.source, r.fail_requests_greater_than_one) for r in plugins)
    seen = next((r for r in plugins if r.source == "plugin"), PluginReading(""))
    by_trust = sorted(readings.topologies, key=lambda r: _TOPOLOGY_BY_TRUST.index(r.source))
    topology = first((r.source, r.policy) for r in by_trust)
    return Plugin(
        allocation_policy=policy or "unknown",
        device_list_strategy=",".join(strategies or ())[:MAX_WORD],
        topology_manager_policy=(topology or "")[:MAX_WORD],
        fail_requests_greater_than_one=rejects,
        ignores_visible_devices=ignores_visible_devices(
            strategies or (), seen.toolkit_ignores_environment
        ),
        source=",".join(used),
    )


def ignores_visible_devices(strategies: Collection[str], toolkit_ignores_environment: bool) -> bool:
    """Return whether it is certain that a pod's own NVIDIA_VISIBLE_DEVICES has no effect.

    The container toolkit uses CDI annotations first, then volume mounts, then the variable. The
    pod's value of the variable overrides the plugin's. If the runtime injects CDI devices, the
    variable is ``void``. ``strategies`` contains the plugin's device list strategies, and is empty
    if they are unknown. If there are several, the runtime's mode decides which strategy takes
    effect.
    """
    if "envvar" not in strategies:
        return bool(strategies)
    return len(set(strategies)) == 1 and toolkit_ignores_environment


def _counts(devices: Sequence[DeviceReading], readings: SharingReadings) -> dict[str, _Counts]:
    """Return the replicas of the node's devices for each registered resource."""
    ids = {replica for reading in readings.registered for replica in reading.healthy}
    ids |= {holding.replica for holding in readings.holdings}
    device_of = resolve(ids, devices)
    counts: dict[str, _Counts] = {}
    for reading in readings.registered:
        count = counts.setdefault(reading.resource, _Counts())
        for replica in reading.healthy & device_of.keys():
            count.healthy.setdefault(device_of[replica], set()).add(replica)
    for holding in readings.holdings:
        if holding.replica in device_of and holding.resource in counts:
            held = counts[holding.resource].held
            held.setdefault(device_of[holding.replica], set()).add(holding.replica)
    for resource, count in counts.items():
        # Replicas that containers hold may belong to an earlier configuration. They count only
        # while nothing is registered because the plugin is restarting.
        seen = count.healthy or count.held
        numbers = [parse(replica).number for ids in seen.values() for replica in ids]
        count.shared = any(number is not None for number in numbers)
        most = max((number + 1 for number in numbers if number is not None), default=0)
        stated = [(r.replicas or {}).get(resource, 0) for r in readings.plugins]
        per_device = min(MAX_REPLICAS, max([most, *stated[:1]])) if count.shared else 1
        count.per_device = per_device
    return counts


def _resource(device: DeviceReading, counts: Mapping[str, _Counts], last: Device | None) -> str:
    """Return the resource under which the plugin advertises the device, or an empty string if it
    advertises none."""

    def weight(resource: str) -> tuple[int, int, bool, str]:
        """Return the number of healthy replicas, the number of held replicas, and whether the
        device had this resource before."""
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
    device: DeviceReading,
    resource: str,
    count: _Counts,
    readings: SharingReadings,
    last: Device | None,
) -> tuple[Share, list[Degraded]]:
    """Return how a device is shared as ``resource``, and the assumptions that this relies on."""
    healthy = count.healthy.get(device.uuid, set())
    total = count.per_device
    if not count.healthy and last is not None and last.resource == resource:
        total = max(total, last.replicas.total)  # Keep the last number while the plugin is down.
    allocated = len(healthy & count.held.get(device.uuid, set()))
    # Limit the replicas to the maximum of a report. A node has far fewer pods.
    replicas = Replicas(
        free=min(len(healthy), MAX_REPLICAS) - min(allocated, MAX_REPLICAS),
        allocated=min(allocated, MAX_REPLICAS),
        unhealthy=min(max(0, total - len(healthy)), MAX_REPLICAS),
    )
    if not (count.shared or (last is not None and last.sharing != "none" and not count.healthy)):
        return Share("none", resource, replicas), []
    sharing = _kind(resource, readings)
    if sharing is None and last is not None and last.sharing != "none":
        sharing = last.sharing
    if sharing is not None:
        return Share(sharing, resource, replicas), []
    why = "it is unknown whether replicas use MPS or time-slicing; time-slicing is assumed"
    return Share("time-slicing", resource, replicas), [Degraded("plugin", why)]


def _kind(resource: str, readings: SharingReadings) -> Sharing | None:
    """Return whether a shared resource uses MPS or time-slicing, or None if unknown."""
    by_source = {r.source: r.sharing for r in readings.plugins}
    answers = {answer.mps for answer in readings.answers if answer.resource == resource}
    if by_source.get("plugin") in ("mps", "time-slicing"):
        return by_source["plugin"]
    if len(answers) == 1:
        return "mps" if answers.pop() else "time-slicing"
    if by_source.get("labels") in ("mps", "time-slicing"):
        return by_source["labels"]
    return None


def _stated(device: DeviceReading, flags: SharingReading, counts: Mapping[str, _Counts]) -> Share:
    """Return the sharing set by the agent's flags, with the kubelet's allocated replicas."""
    count = counts.get(flags.resource, _Counts())
    allocated = min(flags.replicas, len(count.held.get(device.uuid, ())))
    free = flags.replicas - allocated
    return Share(flags.sharing, flags.resource, Replicas(free=free, allocated=allocated))


def _contradictions(
    devices: Sequence[DeviceReading],
    readings: SharingReadings,
    counts: Mapping[str, _Counts],
    found: Mapping[str, Share],
) -> list[Degraded]:
    """Report replicas that are advertised or held but belong to no device or resource, and labels
    that contradict the plugin."""
    complaints: list[Degraded] = []
    plugin_up = any(count.healthy for count in counts.values())
    for reading in readings.registered:
        if (
            reading.resource.startswith(_GPU_RESOURCES)
            and reading.healthy - resolve(reading.healthy, devices).keys()
        ):
            # The GPU was added later, or the agent's container cannot see it.
            why = f"the plugin advertises {reading.resource} of a GPU that the driver does not list"
            complaints.append(Degraded("nvml", Cause(why, "gpu_not_listed")))
    device_of = resolve({holding.replica for holding in readings.holdings}, devices)
    for holding in readings.holdings:
        source = holding.source.partition(",")[0]
        if holding.replica not in device_of:
            if holding.resource.startswith(_GPU_RESOURCES):
                why = f"a pod holds {holding.resource} of a device that the driver does not list"
                complaints.append(Degraded(source, why))
        elif plugin_up and not _advertised(
            holding, found.get(device_of[holding.replica], Share()), counts
        ):
            why = f"a pod holds {holding.resource} that the plugin no longer advertises"
            complaints.append(Degraded(source, why))
    by_source = {r.source: r.sharing for r in readings.plugins}
    if len(by_source) == 2 and len(set(by_source.values())) == 2:
        complaints.append(Degraded("labels", "sharing differs from the plugin's configuration"))
    return complaints


def _advertised(holding: HoldingReading, share: Share, counts: Mapping[str, _Counts]) -> bool:
    """Return whether the plugin advertises the held replica, healthy or not."""
    count = counts.get(holding.resource)
    number = parse(holding.replica).number
    return (
        count is not None
        and holding.resource == share.resource
        and (number is not None) == count.shared
        and (number or 0) < count.per_device
    )
