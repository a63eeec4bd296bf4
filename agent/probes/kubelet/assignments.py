"""Decides which container holds which replica, from what the kubelet wrote and what it says. Pure.

The checkpoint knows uids, PodResources knows names; they meet where container, resource and
replicas are the same, because no two living pods hold one replica. So a pod of the same name that
came back is told from the one before: its replicas stand under its own uid.

An entry that PodResources does not name belongs to a pod that ended, or to a kubelet that does not
know its pods yet. Which of the two, the caller knows from time; until then the checkpoint wins.
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
    #: Uids of entries that PodResources does not name.
    unlisted: frozenset[str] = frozenset()
    #: Uid -> name, of those that it names.
    names: Mapping[str, Name] = field(default_factory=dict)
    #: Whether PodResources names a replica that the checkpoint does not.
    unwritten: bool = False
    #: Whether several pods could be the one that an entry is of.
    ambiguous: bool = False


def join(
    entries: Sequence[Entry],
    listed: Sequence[ListedContainer],
    known_names: Mapping[str, Name],
    ended: Collection[str] = (),
) -> Joined:
    """Join the two views.

    ``known_names`` are those of earlier joins; ``ended`` are uids whose entries are to be left out.
    """
    names, ambiguous = _names(entries, listed)
    told = {**{uid: known_names[uid] for uid in known_names}, **names}
    unlisted = frozenset(entry.pod_uid for entry in entries) - names.keys()
    holdings = [
        HoldingReading(
            "checkpoint,podresources" if entry.pod_uid in names else "checkpoint",
            entry.pod_uid,
            entry.container,
            entry.resource,
            replica,
            *told.get(entry.pod_uid, ("", "")),
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
    """Uid -> name where they meet, and whether somewhere more than two did."""
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
