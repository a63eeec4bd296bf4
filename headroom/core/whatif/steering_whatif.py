"""Finds pods that wait only because the device plugin chooses the device, by simulating steering.

On a *predicted* or *gated* node a pod must fit on every device that the plugin could choose next.
On a steered node it must fit on one device, or on as many devices as a container requests. Only
nodes on which steering is not active are examined.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from headroom.contract.annotations import DEVICE_CHOICE, DeviceChoice
from headroom.contract.commands import command
from headroom.contract.device_choice import STEERING_NOT_PERMITTED, why_kubelet_not_steered
from headroom.contract.gpunode import Reservation
from headroom.contract.kube import Pod
from headroom.contract.quantity import gib
from headroom.contract.reasons import Reason
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.node_settings import node_settings
from headroom.core.placement.fit import Verdicts, fit
from headroom.core.placement.request import Kind, VramRequest
from headroom.core.placement.snapshot import CODE_OF, Snapshot
from headroom.core.rules.eligible_nodes import Eligible, eligibility_key, eligible_nodes
from headroom.core.whatif.held_memory import seen_by, verdicts_on
from headroom.core.whatif.simulated_reports import shared_resources
from headroom.core.whatif.simulation import Placed, Simulation, urgency

#: Reasons that concern a device which the plugin could choose, although another device may fit.
#: With ``MEMORY_ON_ANY`` no device has enough memory, so the choice matters only for containers
#: that request several replicas. The plugin could allocate them all on one device.
_BY_CHOICE = (
    Reason.MEMORY_ON_SOME,
    Reason.UNHEALTHY_DEVICE,
    Reason.COMPUTE_MODE,
    Reason.CORDONED_DEVICE,
    Reason.SM_ABOVE_LIMIT,
)
#: Maximum number of nodes that are simulated for one pod.
_MAX_NODES_OF_POD = 8


@dataclass(frozen=True, slots=True)
class Most:
    """Maximum numbers of pods, of different requests, and of nodes in the simulation of the
    cluster."""

    pods: int = 256
    kinds: int = 64
    nodes: int = 32


MOST = Most()


@dataclass(frozen=True, slots=True)
class Steerable:
    """A node on which steering is not active."""

    node: str
    #: Whether the annotation or the agent's default already requests steering.
    requested: bool
    #: Why steering is not possible. Empty if no obstacle is known.
    obstacle: str
    #: Whether the agent has reported that it may steer, or what prevents it.
    known: bool
    #: Whether the node's kubelet can be steered.
    supported: bool = True

    @property
    def command(self) -> str:
        """The command that steers the node. It also replaces another value of the annotation."""
        words = "annotate", "--overwrite", "node", self.node, f"{DEVICE_CHOICE}=steered"
        return command("kubectl", *words)

    @property
    def to_do(self) -> str:
        """The steps to steer the node, as a phrase."""
        if self.requested:
            return f"remove the obstacle to steering node {self.node}: {self.obstacle}"
        if self.obstacle:
            return f"steering node {self.node} is {self.obstacle}; permit it, then {self.command}"
        return self.command


@dataclass(frozen=True, slots=True)
class Gain:
    """The pods that wait because of the device plugin's choice, and the pods that steering would
    place."""

    waiting_pods: int
    waiting_bytes: int
    placed_pods: int
    placed_bytes: int
    #: The steered nodes that took pods, sorted by the number of pods, highest first.
    nodes: tuple[Steerable, ...]
    #: The largest number of GPUs that one container of the waiting pods requests.
    widest: int = 1

    @property
    def sentence(self) -> str:
        nodes = "1 node" if len(self.nodes) == 1 else f"{len(self.nodes)} nodes"
        waiting, placed = gib(self.waiting_bytes), gib(self.placed_bytes)
        several = self.widest > 1
        devices = "devices" if several else "device"
        if self.waiting_pods == 1:
            have = f"{self.widest} GPUs have" if several else "a GPU has"
            return (
                f"1 pending pod with {waiting} waits although {have} enough free memory for it, "
                f"because the device plugin chooses the {devices}; steering {nodes} would place it"
            )
        have = "enough GPUs have" if several else "a GPU has"
        return (
            f"{self.waiting_pods} pending pods with {waiting} wait although {have} enough free "
            f"memory for each of them, because the device plugin chooses the {devices}; steering "
            f"{nodes} would place {self.placed_pods} of them ({placed})"
        )


@dataclass(frozen=True, slots=True)
class Helped:
    """A node on which the pod would fit if it were steered."""

    node: Steerable
    #: Number of different GPUs that a container of the pod would get.
    gpus: int
    #: Maximum number of bytes that the pod would take on one of them.
    need_bytes: int


def steerable(cluster: Cluster, name: str) -> Steerable | None:
    """Return the node if it has shared devices and steering could replace the plugin's choice."""
    gpunode = cluster.gpunode(name)
    choice = node_settings(cluster.node(name)).device_choice
    if gpunode is None or gpunode.status is None:
        return None
    plugin = gpunode.status.plugin
    if plugin.steered or not shared_resources(gpunode.status):
        return None
    by_default = choice is not DeviceChoice.GATED and plugin.choice_obstacle != ""
    requested = choice is DeviceChoice.STEERED or by_default
    if not_supported := why_kubelet_not_steered(plugin.kubelet_version):
        return Steerable(name, requested, not_supported, known=True, supported=False)
    obstacle = plugin.choice_obstacle
    if not obstacle and plugin.steering_permitted is False:
        obstacle = STEERING_NOT_PERMITTED
    if not obstacle and requested:
        obstacle = "its agent has not reported that it steers"
    return Steerable(name, requested, obstacle, obstacle != "" or plugin.steering_permitted is True)


def helped_by_steering(cluster: Cluster, verdicts: Verdicts) -> list[Helped]:
    """Return nodes on which the pod would fit if they were steered, nodes without an obstacle
    first.

    At most ``_MAX_NODES_OF_POD`` of the nodes that reject the pod are simulated, in the order of
    names. A pod for which memory is held waits for this memory, so the result is empty.
    """
    if verdicts.request.uid in _with_holds(cluster, verdicts.now_s):
        return []
    found = islice(_rejecting(cluster, verdicts), _MAX_NODES_OF_POD)
    helped = [
        fitted for pair in found if (fitted := _if_steered(cluster, verdicts, *pair)) is not None
    ]
    return sorted(helped, key=lambda each: (each.node.obstacle != "", each.node.node))


def steering_gain(cluster: Cluster, snap: Snapshot, now_s: float, most: Most = MOST) -> Gain | None:
    """Simulate all pending pods on steered nodes. Return None if steering would place none of them.

    The first pods by priority and age are examined. At most ``most.nodes`` nodes are steered: the
    nodes that reject the most pods because of the plugin's choice. Pods that would fit on none of
    these nodes do not count. As in filter, memory that is held for other pods is not free for a
    pod. ``snap`` is a snapshot of the cluster, and ``now_s`` the time of this process's monotonic
    clock.
    """
    rejected = list(_rejected(cluster, snap, now_s, most))
    counts = Counter(row for each in rejected for row in each.nodes)
    if not counts:
        return None
    chosen = sorted(counts, key=lambda row: (-counts[row], snap.nodes[row].name))[: most.nodes]
    index_of = {row: index for index, row in enumerate(chosen)}
    simulation = Simulation(cluster, snap.part(np.array(chosen, np.int64)), now_s)
    for row in chosen:
        simulation.steer(snap.nodes[row].name)
    waiting: list[tuple[_Rejected, Eligible, int]] = []
    for each in rejected:
        simulation.hold(each.held)
        rows = np.array(sorted(index_of[row] for row in each.nodes & index_of.keys()), np.int64)
        steered = fit(each.request, simulation.snapshot(), rows, now_s)
        if steered.fits.any():
            waiting.append((each, Eligible(rows, {}), _need_bytes(steered)))
    placed_on: Counter[str] = Counter()
    placed_bytes = 0
    for each, where, need_bytes in waiting:
        simulation.hold(each.held)
        at = simulation.place(each.request, where)
        if isinstance(at, Placed):
            simulation.confirm(each.request.uid, at)
            placed_on[at.node] += 1
            placed_bytes += need_bytes
    names = sorted(placed_on, key=lambda name: (-placed_on[name], name))
    if not names:
        return None
    return Gain(
        len(waiting),
        sum(need_bytes for _, _, need_bytes in waiting),
        placed_on.total(),
        placed_bytes,
        tuple(found for name in names if (found := steerable(cluster, name)) is not None),
        max(ask.widest for each, _, _ in waiting for ask in each.request.asks),
    )


@dataclass(frozen=True, slots=True)
class _Rejected:
    """A pod that fits on no node, and the nodes that reject it because of the plugin's choice."""

    request: VramRequest
    #: Rows of the snapshot.
    nodes: frozenset[int]
    #: Memory that is held for pods that take precedence over this pod, by node and uid.
    held: Mapping[str, Mapping[str, Reservation]]


def _rejected(cluster: Cluster, snap: Snapshot, now_s: float, most: Most) -> Iterator[_Rejected]:
    """Yield pods that a node rejects because of the plugin's choice, in the order of scheduling."""
    eligible_by_key: dict[bytes, Eligible] = {}
    found_by_kind: dict[tuple[Kind, bytes, _Held], tuple[frozenset[int], Snapshot]] = {}
    with_holds = _with_holds(cluster, now_s)
    pods = sorted(cluster.unbound(), key=urgency)
    for pod in pods[: most.pods]:
        if pod.metadata.uid in with_holds:
            continue
        request = cluster.understand(pod)
        if not isinstance(request, VramRequest) or not request.asks or pod.spec.scheduling_gates:
            continue
        where = eligibility_key(pod)
        key = request.kind, where, _held_against(cluster, pod, now_s)
        if key not in found_by_kind:
            if len(found_by_kind) == most.kinds:
                continue
            if where not in eligible_by_key:
                eligible_by_key[where] = eligible_nodes(pod, snap, cluster.node)
            seen = seen_by(cluster, pod, snap, now_s)
            verdicts = verdicts_on(cluster, request, seen, eligible_by_key[where].rows, now_s)
            found_by_kind[key] = _rejecting_nodes(cluster, verdicts, most), seen
        nodes, seen = found_by_kind[key]
        if nodes:
            yield _Rejected(request, nodes, seen.held)


def _with_holds(cluster: Cluster, now_s: float) -> set[str]:
    """Return the uids of the pods for which memory is held."""
    held = cluster.holds.against(None, now_s)
    return {hold.pod.metadata.uid for holds in held.values() for hold in holds}


#: The uids of pods that take precedence over a pod, with their nodes.
_Held = frozenset[tuple[str, str]]


def _held_against(cluster: Cluster, pod: Pod, now_s: float) -> _Held:
    held = cluster.holds.against(pod, now_s)
    return frozenset((node, hold.pod.metadata.uid) for node, of in held.items() for hold in of)


def _rejecting_nodes(cluster: Cluster, verdicts: Verdicts, most: Most) -> frozenset[int]:
    """Return the rows of nodes that reject the pod because of the plugin's choice.

    There are no rows if the pod fits on any node.
    """
    if verdicts.fits.any():
        return frozenset()
    return frozenset(row for row, _ in islice(_rejecting(cluster, verdicts), most.nodes))


def _need_bytes(steered: Verdicts) -> int:
    """Return the bytes that the pod takes on all its devices of the first node on which it fits."""
    i = int(np.flatnonzero(steered.fits)[0])
    return sum(int(verdict.need_bytes[i][verdict.candidates[i]].sum()) for verdict in steered.asks)


def _rejecting(cluster: Cluster, verdicts: Verdicts) -> Iterator[tuple[int, Steerable]]:
    """Yield (row, node) for nodes that reject the pod because of the plugin's choice and can be
    steered.

    The nodes are sorted by name.
    """
    reasons = [*_BY_CHOICE]
    if any(verdict.ask.widest > 1 for verdict in verdicts.asks):
        reasons.append(Reason.MEMORY_ON_ANY)
    by_choice = np.isin(verdicts.codes, [CODE_OF[reason] for reason in reasons])
    rows = verdicts.rows[by_choice]
    for row in rows[np.argsort(verdicts.snap.name_rank[rows])].tolist():
        found = steerable(cluster, verdicts.snap.nodes[row].name)
        if found is not None and found.supported:
            yield row, found


def _if_steered(cluster: Cluster, verdicts: Verdicts, row: int, node: Steerable) -> Helped | None:
    """Return what the pod would get on the node if it were steered, or None if it would not fit."""
    part = verdicts.snap.part(np.array([row], np.int64))
    simulation = Simulation(cluster, part, verdicts.now_s)
    simulation.steer(node.node)
    steered = simulation.verdicts(verdicts.request, node.node)
    if not steered.fits[0]:
        return None
    widest = max(steered.asks, key=lambda verdict: verdict.ask.widest)
    need_bytes = np.where(widest.candidates[0], widest.need_bytes[0], 0).max(initial=0)
    return Helped(node, widest.ask.widest, int(need_bytes))


def nodes_text(found: Sequence[Helped]) -> str:
    """Describe the nodes by the name if there is only one node, and otherwise by their number and
    the first name."""
    first = found[0].node.node
    return f"node {first}" if len(found) == 1 else f"one of {len(found)} nodes, such as {first}"


def choice_text(found: Sequence[Helped]) -> str:
    """Describe what Headroom would choose on the first node."""
    first = found[0]
    if first.gpus == 1:
        return "Headroom chose the device"
    return f"Headroom chose {first.gpus} different GPUs with {gib(first.need_bytes, up=True)} each"
