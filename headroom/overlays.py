"""Prints Karpenter's NodeOverlays: the resources of GPU instance types with sharing and MIG.

Karpenter simulates new nodes with the physical GPUs of their instance type. The instance type
describes neither the replicas and MIG devices that the device plugin offers on the node, nor the
extended resource of the in-tree mirror. A NodeOverlay (karpenter.sh/v1alpha1) adds them.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import yaml

from headroom.contract.annotations import MIRROR
from headroom.contract.errors import BadQuantity
from headroom.contract.gpunode import MAX_REPLICAS
from headroom.contract.quantity import parse_bytes
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.instance_types import TYPE, gpus_of
from headroom.core.cluster.label_inventory import ASSUMED_RESERVED_BYTES, GB
from headroom.core.placement.policy import MIB
from headroom.errors import BadSettings

GPU = "nvidia.com/gpu"
POOL = "karpenter.sh/nodepool"
_EXAMPLE = "Examples: g6.12xlarge, vm.large=2x48Gi, p4d.24xlarge=56x1g.5gb"
_GIVEN = re.compile(r"(?P<name>[^=]+)(?:=(?P<count>[1-9]\d{0,3})x(?P<size>\S+))?")
_PROFILE = re.compile(r"\d+g\.(?P<gb>\d+)gb\S*")
#: Maximum length of an object's name.
MAX_NAME = 253
_NAME_CHARS = re.compile(r"[^a-z0-9.-]+")


@dataclass(frozen=True, slots=True)
class PluginConfig:
    """The resources that a configuration of NVIDIA's device plugin creates on a node."""

    mig_strategy: str = "none"
    #: The number of replicas of each device and the resource that is offered, by the resource as
    #: configured.
    shared: Mapping[str, tuple[int, str]] = field(default_factory=lambda: MappingProxyType({}))

    def offered(self, resource: str, devices: int) -> tuple[str, int]:
        """Return the resource that ``devices`` devices offer, and its amount."""
        replicas, name = self.shared.get(resource, (1, resource))
        return name, devices * replicas


@dataclass(frozen=True, slots=True)
class Capacity:
    """The extended resources of an instance type."""

    instance_type: str
    #: Amounts by resource.
    resources: Mapping[str, int]
    #: A comment for the reader. Empty if there is none.
    note: str = ""


def parse_plugin_config(text: str, source: str) -> PluginConfig:
    """Read a configuration of the device plugin. Raises ``BadSettings``."""
    try:
        content = _mapping(yaml.safe_load(text))
        flags, sharing = _mapping(content.get("flags")), _mapping(content.get("sharing"))
        # The plugin uses MPS if both are configured.
        part = _mapping(sharing.get("mps")) or _mapping(sharing.get("timeSlicing"))
        renamed = ".shared" if part.get("renameByDefault") is True else ""
        shared: dict[str, tuple[int, str]] = {}
        for each in map(_mapping, part.get("resources") or ()):
            name, replicas = str(each["name"]), int(each["replicas"])
            if not 1 <= replicas <= MAX_REPLICAS:
                raise ValueError(f"{name} has {replicas} replicas, not 1 to {MAX_REPLICAS}")
            full = name if "/" in name else f"nvidia.com/{name}"
            other = str(each.get("rename") or "")
            other = other if "/" in other or not other else f"nvidia.com/{other}"
            shared[full] = replicas, other or full + renamed
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as err:
        raise BadSettings(f"{source}: not a configuration of the device plugin: {err}") from err
    return PluginConfig(str(flags.get("migStrategy") or "none"), shared)


def _mapping(value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{str(value)[:40]!r} is not a mapping")
    return value


def of_type(text: str, config: PluginConfig, mirror: bool) -> Capacity:
    """Return the resources of an instance type, given as NAME, NAME=COUNTxMEMORY or, for MIG
    devices, NAME=COUNTxPROFILE. Raises ``BadSettings``."""
    match = _GIVEN.fullmatch(text)
    if match is None:
        raise BadSettings(f"{text[:80]!r} is not an instance type. {_EXAMPLE}")
    name, size = match["name"], match["size"]
    if size is None:
        known = gpus_of(name)
        if known is None:
            raise BadSettings(
                f"the GPUs of instance type {name[:80]} are not known: write NAME=COUNTxMEMORY. "
                f"{_EXAMPLE}"
            )
        return _capacity(name, GPU, known.count, known.memory_gb * GB, config, mirror)
    count = int(match["count"])
    if profile := _PROFILE.fullmatch(size):
        if config.mig_strategy not in ("single", "mixed"):
            raise BadSettings(
                f"{text[:80]}: the device plugin offers no MIG devices with migStrategy "
                f"{config.mig_strategy[:40]!r}. Example of its configuration: flags: "
                "{migStrategy: mixed}"
            )
        resource = GPU if config.mig_strategy == "single" else f"nvidia.com/mig-{size}"
        return _capacity(name, resource, count, int(profile["gb"]) * GB, config, mirror)
    try:
        return _capacity(name, GPU, count, parse_bytes(size), config, mirror)
    except BadQuantity as err:
        raise BadSettings(f"{text[:80]}: {err}. {_EXAMPLE}") from err


def _capacity(
    name: str, resource: str, devices: int, memory_bytes: int, config: PluginConfig, mirror: bool
) -> Capacity:
    offered, amount = config.offered(resource, devices)
    resources = {offered: amount}
    if offered != GPU:
        # The instance type has physical GPUs, which this configuration does not offer.
        resources = {GPU: 0, **resources}
    if mirror:
        free_bytes = max(0, memory_bytes - ASSUMED_RESERVED_BYTES)
        resources[MIRROR] = devices * (free_bytes // MIB)
    return Capacity(name, resources)


def of_nodes(cluster: Cluster, mirror: bool) -> list[Capacity]:
    """Return the resources of each instance type, as the type's GPU nodes offer them.

    Unhealthy and cordoned devices count, because a new node has none. If the nodes of a type
    differ, the smallest amounts count, so that pods fit on the nodes that are added."""
    found: dict[str, list[dict[str, int]]] = defaultdict(list)
    for terms in cluster.snapshot().nodes:
        node = cluster.node(terms.name)
        instance_type = ((node and node.metadata.labels) or {}).get(TYPE, "")
        devices = [t for t in terms.devices if cluster.rules.manages(t.device.resource)]
        if not instance_type or not devices:
            continue
        resources: dict[str, int] = {}
        for each in devices:
            name = each.device.resource
            resources[name] = resources.get(name, 0) + each.device.replicas.total
        if GPU not in resources:
            resources = {GPU: 0, **resources}
        if mirror:
            resources[MIRROR] = sum(
                each.allocatable_bytes // max(each.sharers, 1) // MIB for each in devices
            )
        found[instance_type].append(resources)
    return [_smallest(name, amounts) for name, amounts in sorted(found.items())]


def _smallest(instance_type: str, amounts: Sequence[Mapping[str, int]]) -> Capacity:
    names = dict.fromkeys(name for each in amounts for name in each)
    smallest = {name: min(each.get(name, 0) for each in amounts) for name in names}
    differ = any(each != amounts[0] for each in amounts)
    note = f"the {len(amounts)} nodes of {instance_type} differ: the smallest amounts are shown"
    return Capacity(instance_type, smallest, note if differ else "")


def overlays(capacities: Sequence[Capacity], pool: str | None = None) -> Iterator[str]:
    """Yield the NodeOverlays as YAML documents, one for all instance types with equal resources.

    If ``pool`` is set, they apply only to this NodePool. Raises ``BadSettings`` if a type occurs
    twice.
    """
    (most, count), *_ = Counter(each.instance_type for each in capacities).most_common(1)
    if count > 1:
        raise BadSettings(f"instance type {most[:80]} is named {count} times: name it once")
    alike: dict[tuple[tuple[str, int], ...], list[Capacity]] = {}
    for each in capacities:
        alike.setdefault(tuple(each.resources.items()), []).append(each)
    for resources, of in alike.items():
        types = sorted(each.instance_type for each in of)
        requirements = [{"key": TYPE, "operator": "In", "values": types}]
        if pool:
            requirements.append({"key": POOL, "operator": "In", "values": [pool]})
        name = "-".join(["headroom", *([pool] if pool else []), types[0]])
        body = {
            "apiVersion": "karpenter.sh/v1alpha1",
            "kind": "NodeOverlay",
            "metadata": {"name": _NAME_CHARS.sub("-", name.lower())[:MAX_NAME].strip("-.")},
            "spec": {
                "requirements": requirements,
                "capacity": {resource: str(amount) for resource, amount in resources},
            },
        }
        notes = "".join(f"# {each.note}\n" for each in of if each.note)
        yield notes + yaml.safe_dump(body, sort_keys=False)
