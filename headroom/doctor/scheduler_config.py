"""Rules of the doctor about values in a KubeSchedulerConfiguration that are unsafe or slow with
Headroom.

The shipped configuration (deploy/base/kube-scheduler.yaml) has no findings, and
docs/design/kube-scheduler.md gives the reason for each value. Errors that kube-scheduler itself
rejects are not checked here.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from headroom.contract.annotations import COUNTED_VRAM
from headroom.contract.kube import Node
from headroom.doctor.findings import Finding, PartialFinding, Weight, warnings_first
from headroom.errors import BadSettings
from headroom.runtime.settings.settings import Settings

KIND = "KubeSchedulerConfiguration"
#: Default of a profile's ``schedulerName``, and of a pod's ``spec.schedulerName``.
DEFAULT_SCHEDULER = "default-scheduler"
#: Suitable values of ``httpTimeout``. kube-scheduler cancels a call after this time, and schedules
#: no other pod until then.
SHORTEST_S, LONGEST_S = 1.0, 10.0
#: kube-scheduler's default for ``httpTimeout``.
DEFAULT_TIMEOUT = "5s"
_EXAMPLE = "see deploy/base/kube-scheduler.yaml"
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(h|ms|us|m|s)")
_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}


def examine_scheduler_file(
    path: Path, settings: Settings, nodes: Sequence[Node] = ()
) -> list[Finding]:
    """Examine a KubeSchedulerConfiguration file, and compare it with what ``nodes`` offer.

    Raises ``BadSettings`` if the file cannot be read or has another kind.
    """
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        offered = offered_resources(nodes, settings.rules.manages)
        return examine_scheduler(config, settings, offered)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as err:
        raise BadSettings(f"{path}: cannot be read: {err}") from err
    except BadSettings as err:
        raise BadSettings(f"{path}: {err}") from err


def examine_scheduler(
    config: object, settings: Settings, offered: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> list[Finding]:
    """Examine a decoded KubeSchedulerConfiguration. Return the findings, warnings first.

    ``settings`` are the extender's settings. ``offered`` maps the GPU resources of the cluster to
    the nodes that offer them (``offered_resources``). Raises ``BadSettings`` if ``config`` is not a
    KubeSchedulerConfiguration.
    """
    manages = settings.rules.manages
    whole, entries = _headroom_entries(config, manages)
    found = [Finding(weight, (), what, do) for weight, what, do in _configuration(whole, entries)]
    for where, entry in entries:
        of_entry = (
            *_safety(entry, manages),
            *_managed_resources(whole, entry, offered),
            *_speed(entry),
            *_late_binds(entry, settings.bind_deadline_s),
        )
        found += [Finding(weight, (where,), what, do) for weight, what, do in of_entry]
    if settings.count_vram and entries:
        found += _counted_vram(whole)
    if settings.preempt_for_memory:
        found += [
            Finding(
                Weight.WARNING,
                (where,),
                "it has no preemptVerb: preempt_for_memory has no effect",
                "set preemptVerb: preempt",
            )
            for where, entry in entries
            if entry.get("filterVerb") and not entry.get("preemptVerb")
        ]
    if settings.filter_best_only:
        found += _filter_after(whole, [where for where, _ in entries])
    return warnings_first(found)


def calls_headroom(config: object, manages: Callable[[str], bool]) -> bool:
    """Return whether the configuration has an extender entry for Headroom.

    Return False if ``config`` is not a valid KubeSchedulerConfiguration.
    """
    try:
        return bool(_headroom_entries(config, manages)[1])
    except BadSettings:
        return False


def _headroom_entries(
    config: object, manages: Callable[[str], bool]
) -> tuple[Mapping[str, Any], list[tuple[str, Mapping[str, Any]]]]:
    """Return the configuration, and the path and content of each entry that may be Headroom's."""
    if not isinstance(config, Mapping) or config.get("kind") != KIND:
        raise BadSettings(f"not a KubeSchedulerConfiguration; for an example {_EXAMPLE}")
    entries = config.get("extenders") or []
    if not isinstance(entries, Sequence) or not all(isinstance(e, Mapping) for e in entries):
        raise BadSettings(f"extenders: not a list of mappings; for an example {_EXAMPLE}")
    return config, [
        (f"extenders[{number}]", entry)
        for number, entry in enumerate(entries)
        if entry.get("bindVerb") or any(manages(name) for name in _managed(entry))
    ]


def _configuration(
    config: Mapping[str, Any], entries: Sequence[object]
) -> Iterator[PartialFinding]:
    if not entries:
        yield (
            Weight.WARNING,
            "kube-scheduler does not call Headroom: no extender binds pods or manages Headroom's "
            "resources",
            f"add the extender; {_EXAMPLE}",
        )
    percentages = [config, *_mappings(config.get("profiles"))]
    if entries and not any(each.get("percentageOfNodesToScore") == 100 for each in percentages):
        yield (
            Weight.WARNING,
            "percentageOfNodesToScore is not 100: kube-scheduler sends Headroom only a sample of "
            "the nodes. If the pod fits on none of these, it waits for minutes even if others fit",
            "set percentageOfNodesToScore: 100",
        )


def _safety(entry: Mapping[str, Any], manages: Callable[[str], bool]) -> Iterator[PartialFinding]:
    for verb, impact in (
        ("filterVerb", "kube-scheduler chooses nodes without a check of GPU memory"),
        ("bindVerb", "no memory is reserved before a bind, only after Headroom sees the bound pod"),
    ):
        if not entry.get(verb):
            name = verb.removesuffix("Verb")
            yield Weight.WARNING, f"it has no {verb}: {impact}", f"set {verb}: {name}"
    if entry.get("ignorable") is True:
        yield (
            Weight.WARNING,
            "it is ignorable: while Headroom does not answer, pods are bound without a check "
            "of GPU memory",
            "set ignorable: false",
        )
    for resource in _mappings(entry.get("managedResources")):
        if resource.get("ignoredByScheduler") is True and manages(str(resource.get("name"))):
            yield (
                Weight.WARNING,
                f"{resource.get('name')} is ignoredByScheduler: kube-scheduler does not count its "
                "replicas, and the kubelet rejects pods on nodes without a free replica",
                "set ignoredByScheduler: false",
            )


def _managed_resources(
    config: Mapping[str, Any], entry: Mapping[str, Any], offered: Mapping[str, Sequence[str]]
) -> Iterator[PartialFinding]:
    """Compare ``managedResources`` with the resources that the nodes offer.

    kube-scheduler does not call Headroom for pods that request only other resources. Without
    ``managedResources``, it calls Headroom for all pods.
    """
    names, schedulers = _managed(entry), _scheduler_names(config)
    if not names:
        if DEFAULT_SCHEDULER in schedulers:
            yield (
                Weight.ADVICE,
                "it has no managedResources: every pod of the cluster's default scheduler waits "
                "for Headroom, even while Headroom restarts",
                "set managedResources to the names of your GPU resources; see "
                "deploy/default-scheduler/kube-scheduler.yaml",
            )
        return
    if DEFAULT_SCHEDULER not in schedulers:
        yield (
            Weight.ADVICE,
            "it has managedResources: pods of this scheduler that request a GPU resource with "
            "another name are bound without a check of GPU memory",
            f"remove managedResources: only pods that name this scheduler use it; {_EXAMPLE}",
        )
    for resource in sorted(offered.keys() - names):
        nodes = offered[resource]
        count = "1 node offers" if len(nodes) == 1 else f"{len(nodes)} nodes offer"
        yield (
            Weight.WARNING,
            f"managedResources does not name {resource}, which {count} (such as {min(nodes)}): "
            "pods that request it are bound without a check of GPU memory",
            f"add {{name: {resource}, ignoredByScheduler: false}} to managedResources",
        )


def offered_resources(
    nodes: Iterable[Node], manages: Callable[[str], bool]
) -> dict[str, list[str]]:
    """Map each managed resource that nodes offer to the names of these nodes."""
    offered: dict[str, list[str]] = {}
    for node in nodes:
        for resource in _resources(node):
            if manages(resource):
                offered.setdefault(resource, []).append(node.metadata.name)
    return offered


def _resources(node: Node) -> Iterable[str]:
    return (node.status.allocatable if node.status else None) or ()


def _counted_vram(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Find profiles that do not ignore the resource that only ResourceQuotas count."""
    for number, profile in enumerate(_mappings(config.get("profiles") or [{}])):
        args = [
            each.get("args")
            for each in _mappings(profile.get("pluginConfig"))
            if each.get("name") == "NodeResourcesFit"
        ]
        ignored = (each.get("ignoredResources") for each in _mappings(args))
        if not any(isinstance(each, Sequence) and COUNTED_VRAM in each for each in ignored):
            yield Finding(
                Weight.WARNING,
                (f"profiles[{number}]",),
                f"with count_vram, GPU pods request {COUNTED_VRAM}, which no node offers: pods of "
                "this profile are never placed",
                f"set ignoredResources: [{COUNTED_VRAM}] in the args of NodeResourcesFit",
            )


def _filter_after(config: Mapping[str, Any], headroom: Sequence[str]) -> Iterator[Finding]:
    after_headroom = False
    for number, entry in enumerate(config.get("extenders") or ()):
        where = f"extenders[{number}]"
        after_headroom = after_headroom or where in headroom
        if after_headroom and where not in headroom and entry.get("filterVerb"):
            yield Finding(
                Weight.WARNING,
                (where,),
                "it filters after Headroom, which returns one node only (filter_best_only): if "
                "this extender rejects that node, the pod waits even if it fits elsewhere",
                "move it before Headroom, or set Headroom's filter_best_only: false",
            )


def _speed(entry: Mapping[str, Any]) -> Iterator[PartialFinding]:
    if entry.get("nodeCacheCapable") is not True:
        yield (
            Weight.WARNING,
            "it is not nodeCacheCapable: every call sends all nodes as whole objects, and with "
            "more than about 1,800 nodes Headroom rejects the call as too large",
            "set nodeCacheCapable: true",
        )
    seconds = _seconds(entry.get("httpTimeout"))
    if seconds is not None and not SHORTEST_S <= seconds <= LONGEST_S:
        yield (
            Weight.ADVICE,
            f"its httpTimeout is {entry['httpTimeout']}: during a long timeout, kube-scheduler "
            "places no other pod; after a short timeout, it cancels binds that are in progress",
            "set httpTimeout: 5s",
        )
    if entry.get("prioritizeVerb") and not entry.get("weight"):
        yield (
            Weight.ADVICE,
            "it has no weight: Headroom's scores do not count",
            f"set weight: 2, and matching weights for kube-scheduler's plugins; {_EXAMPLE}",
        )


def _late_binds(entry: Mapping[str, Any], bind_deadline_s: float) -> Iterator[PartialFinding]:
    seconds = _seconds(entry.get("httpTimeout", DEFAULT_TIMEOUT))
    if entry.get("bindVerb") and seconds is not None and seconds <= bind_deadline_s:
        yield (
            Weight.ADVICE,
            f"its httpTimeout is {seconds:g} s, and Headroom may retry a bind with newer data for "
            f"{bind_deadline_s:g} s (bind_deadline_s): by then kube-scheduler has cancelled the "
            "bind and released the pod's CPU, ports and volumes",
            "set bind_deadline_s below httpTimeout",
        )


def _scheduler_names(config: Mapping[str, Any]) -> set[str]:
    """Return the names of the schedulers for which the configuration has a profile."""
    profiles = [*_mappings(config.get("profiles"))] or [{}]
    return {str(each.get("schedulerName") or DEFAULT_SCHEDULER) for each in profiles}


def _managed(entry: Mapping[str, Any]) -> set[str]:
    return {str(each.get("name")) for each in _mappings(entry.get("managedResources"))}


def _mappings(value: object) -> Iterable[Mapping[str, Any]]:
    if not isinstance(value, Sequence):
        return ()
    return (each for each in value if isinstance(each, Mapping))


def _seconds(value: object) -> float | None:
    """Return the seconds of a Go duration such as 1m30s, or None if ``value`` is not a duration."""
    parts = _DURATION.findall(value) if isinstance(value, str) else []
    if not parts or "".join(number + unit for number, unit in parts) != value:
        return None
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)
