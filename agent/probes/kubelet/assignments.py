"""Decides which container holds which replica, from checkpoint and PodResources. Pure.

The checkpoint has the uids of pods, PodResources has their names. Entries with equal container,
resource and replicas are of the same pod, because no two running pods hold the same replica. So a
recreated pod of the same name is distinguished from its predecessor by its uid.

There are two reasons why PodResources may not list an entry of the checkpoint: the pod has ended,
or the kubelet has just started and has not loaded its pods. The caller decides that by time. Until
then the checkpoint counts.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from agent.probes.kubelet.checkpoint import Entry
from agent.probes.kubelet.podresources import ListedContainer
from agent.probes.readings import HoldingReading

#: Namespace and name of a pod.
Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Joined:
    holdings: list[HoldingReading]
    #: Uids of entries that PodResources does not list.
    unlisted: frozenset[str] = frozenset()
    #: Uid -> name of the pods that PodResources lists.
    names: Mapping[str, Name] = field(default_factory=dict)
    #: Whether PodResources lists a replica that the checkpoint does not have.
    unwritten: bool = False
    #: Whether an entry matches several pods.
    ambiguous: bool = False


def join(
    entries: Sequence[Entry],
    listed: Sequence[ListedContainer],
    known_names: Mapping[str, Name],
    ended: Collection[str] = (),
) -> Joined:
    """Join checkpoint and PodResources.

    ``known_names`` are uid -> name of earlier joins. Entries of the uids ``ended`` are left out.
    """
    names, ambiguous = _names(entries, listed)
    all_names = {**known_names, **names}
    unlisted = frozenset(entry.pod_uid for entry in entries) - names.keys()
    holdings = [
        HoldingReading(
            "checkpoint,podresources" if entry.pod_uid in names else "checkpoint",
            entry.pod_uid,
            entry.container,
            entry.resource,
            replica,
            *all_names.get(entry.pod_uid, ("", "")),
        )
        for entry in entries
        if entry.pod_uid not in ended or entry.pod_uid in names
        for replica in entry.replicas
    ]
    written = {(each.container, each.resource, each.replica) for each in holdings}
    unwritten = [
        HoldingReading("podresources", "", c.container, resource, replica, c.namespace, c.pod)
        for c in listed
        for resource, replicas in c.devices.items()
        for replica in sorted(replicas)
        if (c.container, resource, replica) not in written
    ]
    return Joined(holdings + unwritten, unlisted, names, bool(unwritten), ambiguous)


def _names(
    entries: Sequence[Entry], listed: Sequence[ListedContainer]
) -> tuple[dict[str, Name], bool]:
    """Return uid -> name of the unique matches, and whether any match was ambiguous."""
    holders: dict[tuple[str, str, frozenset[str]], set[Name]] = {}
    for container in listed:
        for resource, replicas in container.devices.items():
            key = (container.container, resource, replicas)
            holders.setdefault(key, set()).add((container.namespace, container.pod))
    candidates: dict[str, set[Name]] = {}
    for entry in entries:
        key = (entry.container, entry.resource, frozenset(entry.replicas))
        candidates.setdefault(entry.pod_uid, set()).update(holders.get(key, ()))
    claimed: dict[Name, list[str]] = {}
    for uid, found in candidates.items():
        for name in found:
            claimed.setdefault(name, []).append(uid)
    names = {
        uid: name
        for uid, found in candidates.items()
        if len(found) == 1
        for name in found
        if len(claimed[name]) == 1
    }
    return names, any(candidates[uid] and uid not in names for uid in candidates)
