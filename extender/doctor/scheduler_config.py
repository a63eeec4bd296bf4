"""What in a KubeSchedulerConfiguration costs safety or time with Headroom, and what to write.

The configuration that we ship (deploy/base/kube-scheduler.yaml) is free of all of it; why each
value is what it is, docs/scheduler.md says. Of what kube-scheduler refuses by itself
nothing is said here.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from contract.kube import Node
from extender.doctor.findings import Finding, Said, Weight, warnings_first
from extender.errors import BadSettings

KIND = "KubeSchedulerConfiguration"
#: A call that takes longer is given up, and until then no other pod is scheduled.
SHORTEST_S, LONGEST_S = 1.0, 10.0
#: kube-scheduler's default for ``httpTimeout``.
DEFAULT_TIMEOUT = "5s"
_EXAMPLE = "see deploy/base/kube-scheduler.yaml"
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(h|ms|us|m|s)")
_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}


def examine_scheduler(
    config: object,
    manages: Callable[[str], bool],
    best_only: bool = False,
    offered: Mapping[str, Sequence[str]] = MappingProxyType({}),
    bind_deadline_s: float = 0.0,
) -> list[Finding]:
    """Examines a decoded KubeSchedulerConfiguration.

    ``manages`` returns whether an extended resource is Headroom's, ``best_only`` is the setting
    ``filter_best_only``, ``offered`` maps the GPU resources of the cluster to the nodes that offer
    them (``offered_resources``), ``bind_deadline_s`` is the setting of that name. Raises
    ``BadSettings`` for anything else than a KubeSchedulerConfiguration.
    """
    whole, ours = _ours(config, manages)
    found = [Finding(weight, (), what, do) for weight, what, do in _whole(whole, ours)]
    for where, entry in ours:
        said = (
            *_safety(entry, manages),
            *_unnamed(entry, offered),
            *_speed(entry),
            *_late_binds(entry, bind_deadline_s),
        )
        found += [Finding(weight, (where,), what, do) for weight, what, do in said]
    if best_only:
        found += _filter_after(whole, [where for where, _ in ours])
    return warnings_first(found)


def asks_headroom(config: object, manages: Callable[[str], bool]) -> bool:
    """Whether an extender in there is Headroom; no where nothing in there can be understood."""
    try:
        return bool(_ours(config, manages)[1])
    except BadSettings:
        return False


def _ours(
    config: object, manages: Callable[[str], bool]
) -> tuple[Mapping[str, Any], list[tuple[str, Mapping[str, Any]]]]:
    """The configuration, and what in it may be Headroom: where, and what."""
    if not isinstance(config, Mapping) or config.get("kind") != KIND:
        raise BadSettings(f"it is no KubeSchedulerConfiguration; for a right one {_EXAMPLE}")
    entries = config.get("extenders") or []
    if not isinstance(entries, Sequence) or not all(isinstance(e, Mapping) for e in entries):
        raise BadSettings(f"extenders: it is no list of mappings; for a right one {_EXAMPLE}")
    return config, [
        (f"extenders[{number}]", entry)
        for number, entry in enumerate(entries)
        if entry.get("bindVerb") or any(manages(name) for name in _managed(entry))
    ]


def _whole(config: Mapping[str, Any], ours: Sequence[object]) -> Iterator[Said]:
    if not ours:
        yield (
            Weight.WARNING,
            "kube-scheduler does not ask Headroom: no extender manages its resources",
            f"add one; {_EXAMPLE}",
        )
    percentages = [config, *_mappings(config.get("profiles"))]
    if ours and not any(each.get("percentageOfNodesToScore") == 100 for each in percentages):
        yield (
            Weight.WARNING,
            "percentageOfNodesToScore is not 100: Headroom is asked about a sample of the nodes, "
            "and where none of it has room the pod waits for minutes, though others may have",
            "set percentageOfNodesToScore: 100",
        )


def _safety(entry: Mapping[str, Any], manages: Callable[[str], bool]) -> Iterator[Said]:
    for verb, without in (
        ("filterVerb", "nobody looks at GPU memory before a node is chosen"),
        ("bindVerb", "nothing is promised, and what is bound is charged only when it is seen"),
    ):
        if not entry.get(verb):
            name = verb.removesuffix("Verb")
            yield Weight.WARNING, f"it has no {verb}: {without}", f"set {verb}: {name}"
    if entry.get("ignorable") is True:
        yield (
            Weight.WARNING,
            "it is ignorable: while Headroom does not answer, pods are bound without a look at GPU "
            "memory",
            "set ignorable: false",
        )
    for resource in _mappings(entry.get("managedResources")):
        if resource.get("ignoredByScheduler") is True and manages(str(resource.get("name"))):
            yield (
                Weight.WARNING,
                f"{resource.get('name')} is ignoredByScheduler: nobody counts its replicas, and "
                "the kubelet refuses pods that were bound where none is free",
                "set ignoredByScheduler: false",
            )


def _unnamed(entry: Mapping[str, Any], offered: Mapping[str, Sequence[str]]) -> Iterator[Said]:
    """Compares ``managedResources`` with what the nodes offer: kube-scheduler binds pods that
    request any other resource by itself."""
    names = _managed(entry)
    if not names:
        yield (
            Weight.ADVICE,
            "it has no managedResources: every pod of this scheduler waits for Headroom, and for "
            "its restart",
            f"set managedResources to the names of your GPU resources; {_EXAMPLE}",
        )
        return
    for resource in sorted(offered.keys() - names):
        nodes = offered[resource]
        count = "1 node offers" if len(nodes) == 1 else f"{len(nodes)} nodes offer"
        yield (
            Weight.WARNING,
            f"managedResources does not name {resource}, which {count} (such as {min(nodes)}): "
            "pods that request it are bound without a look at GPU memory",
            f"add {{name: {resource}, ignoredByScheduler: false}} to managedResources",
        )


def offered_resources(
    nodes: Iterable[Node], manages: Callable[[str], bool]
) -> dict[str, list[str]]:
    """Maps each managed resource that nodes offer to the names of these nodes."""
    offered: dict[str, list[str]] = {}
    for node in nodes:
        for resource in _resources(node):
            if manages(resource):
                offered.setdefault(resource, []).append(node.metadata.name)
    return offered


def unmanaged_gpus(nodes: Iterable[Node], manages: Callable[[str], bool]) -> list[Finding]:
    """Finds nodes with GPUs that offer them only under names that the settings do not manage."""
    nodes_of: dict[str, list[str]] = {}
    for node in nodes:
        theirs = [name for name in _resources(node) if name.startswith("nvidia.com/")]
        labels = node.metadata.labels or {}
        if "nvidia.com/gpu.count" in labels and theirs and not any(map(manages, theirs)):
            for name in theirs:
                nodes_of.setdefault(name, []).append(node.metadata.name)
    return [
        Finding(
            Weight.WARNING,
            tuple(names),
            f"the node offers its GPUs as {resource}, which Headroom does not manage: pods that "
            "request it are bound without a look at GPU memory",
            f"add {resource} to the setting resources, or remove the name from the device "
            "plugin's configuration",
        )
        for resource, names in sorted(nodes_of.items())
    ]


def _resources(node: Node) -> Iterable[str]:
    return (node.status.allocatable if node.status else None) or ()


def _filter_after(config: Mapping[str, Any], ours: Sequence[str]) -> Iterator[Finding]:
    behind = False
    for number, entry in enumerate(config.get("extenders") or ()):
        where = f"extenders[{number}]"
        behind = behind or where in ours
        if behind and where not in ours and entry.get("filterVerb"):
            yield Finding(
                Weight.WARNING,
                (where,),
                "it filters after Headroom, which answers with one node (filter_best_only): where "
                "this extender refuses that one the pod waits, though others may have room",
                "put it before Headroom, or set Headroom's filter_best_only: false",
            )


def _speed(entry: Mapping[str, Any]) -> Iterator[Said]:
    if entry.get("nodeCacheCapable") is not True:
        yield (
            Weight.WARNING,
            "it is not nodeCacheCapable: every call sends all nodes, megabytes of them, and more "
            "than some 1,800 are refused",
            "set nodeCacheCapable: true",
        )
    seconds = _seconds(entry.get("httpTimeout"))
    if seconds is not None and not SHORTEST_S <= seconds <= LONGEST_S:
        yield (
            Weight.ADVICE,
            f"its httpTimeout is {entry['httpTimeout']}: kube-scheduler places nobody else while "
            "it waits, and gives a bind up that is under way if it is too short",
            "set httpTimeout: 5s",
        )
    if entry.get("prioritizeVerb") and not entry.get("weight"):
        yield (
            Weight.ADVICE,
            "it has no weight: Headroom's choice of a node counts for nothing",
            f"set weight: 2, and those of kube-scheduler's plugins beside it; {_EXAMPLE}",
        )


def _late_binds(entry: Mapping[str, Any], bind_deadline_s: float) -> Iterator[Said]:
    seconds = _seconds(entry.get("httpTimeout", DEFAULT_TIMEOUT))
    if entry.get("bindVerb") and seconds is not None and seconds <= bind_deadline_s:
        yield (
            Weight.ADVICE,
            f"its httpTimeout is {seconds:g} s, and Headroom may complete a bind on newer facts "
            f"for {bind_deadline_s:g} s (bind_deadline_s): kube-scheduler has given it up by then, "
            "and with it the pod's CPU, ports and volumes",
            "set bind_deadline_s below httpTimeout",
        )


def _managed(entry: Mapping[str, Any]) -> set[str]:
    return {str(each.get("name")) for each in _mappings(entry.get("managedResources"))}


def _mappings(value: object) -> Iterable[Mapping[str, Any]]:
    if not isinstance(value, Sequence):
        return ()
    return (each for each in value if isinstance(each, Mapping))


def _seconds(value: object) -> float | None:
    """Of a duration as Go writes it; None where it is none, or not said."""
    parts = _DURATION.findall(value) if isinstance(value, str) else []
    if not parts or "".join(number + unit for number, unit in parts) != value:
        return None
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)
