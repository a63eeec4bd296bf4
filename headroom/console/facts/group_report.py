"""Describes a group of pods: how many are bound, how many wait, and where these would fit."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from headroom.contract.kube import Pod
from headroom.core.cluster.cluster import Cluster
from headroom.core.groups.membership import Group, named_group_of
from headroom.core.placement.request import VramRequest
from headroom.core.placement.snapshot import Snapshot
from headroom.core.whatif.simulation import Placed, Simulation

#: Maximum number of waiting pods for which a node is searched. Each search takes milliseconds.
MOST_PLACED = 64
#: Maximum number of nodes that the sentence names.
MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class GroupReport:
    group: Group
    #: Number of pods of the group that have not ended.
    pods: int
    bound: int
    #: Number of waiting pods of the group by the memory that they request.
    waiting: Mapping[str, int]
    #: Number of waiting pods for which a node was searched.
    tried: int
    #: For each node, the number of waiting pods that fit there together with the others.
    fits: Mapping[str, int]

    @property
    def sentence(self) -> str:
        name, whole = self.group.name, f"{self.bound} of {self.pods} pods of group"
        if not self.waiting:
            return f"{whole} {name} are bound"
        return f"{whole} {name} are bound, waiting for {self.requests}{self._where()}"

    @property
    def requests(self) -> str:
        """The requests of the waiting pods, such as "5 x 12Gi"."""
        return ", ".join(f"{count} x {size}" for size, count in sorted(self.waiting.items()))

    @property
    def all_fit(self) -> bool:
        """Whether a node was found for each waiting pod."""
        return sum(self.fits.values()) == self.tried == sum(self.waiting.values())

    def _where(self) -> str:
        placed = sum(self.fits.values())
        if not self.tried:
            return ""
        if not placed:
            return "; none of them fits now"
        names = sorted(self.fits, key=lambda name: (-self.fits[name], name))
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        on = f"on {', '.join(names[:MOST_NAMED])}{more}"
        if self.all_fit:
            return f"; all would fit {on}"
        return f"; {placed} of the first {self.tried} would fit {on}"


def group_report(
    cluster: Cluster, pod: Pod, snap: Snapshot, now_s: float, most_placed: int = MOST_PLACED
) -> GroupReport | None:
    """Return the report of the pod's group; None if it has none.

    ``snap`` is the snapshot as filter sees it for the pod. At most ``most_placed`` pods are tried.
    """
    if (group := named_group_of(pod)) is None:
        return None
    members = [
        each
        for each in cluster.pods()
        if each.metadata.namespace == group.namespace and not each.ended
        if named_group_of(each) == group
    ]
    waiting = sorted((each for each in members if not each.node), key=_age)
    simulation, fits = Simulation(cluster, snap, now_s), Counter[str]()
    tried = list(islice(waiting, most_placed))
    for each in tried:
        request = cluster.understand(each)
        if not isinstance(request, VramRequest) or not request.asks:
            continue
        placed = simulation.place(request, simulation.eligible(each))
        if isinstance(placed, Placed):
            fits[placed.node] += 1
    sizes = Counter(_size(cluster, each) for each in waiting)
    return GroupReport(group, len(members), len(members) - len(waiting), sizes, len(tried), fits)


def _size(cluster: Cluster, pod: Pod) -> str:
    request = cluster.understand(pod)
    if not isinstance(request, VramRequest):
        return "a request that cannot be read"
    amounts = [ask.amount_text for ask in request.containers]
    return " + ".join(amounts) or "no GPU"


def _age(pod: Pod) -> tuple[str, str]:
    return pod.metadata.creation_timestamp or "", pod.metadata.name
