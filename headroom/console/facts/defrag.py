"""Finds the fewest pods to move so that a waiting pod fits, or the GPUs of a node hold no pod.

``movable_pods`` decides which pods may be moved. The search simulates the moves one
after another, and then places the waiting pod.

It tries every single pod on all nodes first, then every pair, and so on. So the first set that
helps has the fewest pods, unless ``Effort`` ends the search early. On one node, it tries pods of
low priority first, and among equal priorities the pods that started last.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations
from typing import Literal

from headroom.console.facts.movable_pods import Move, Movers, Stays, charged_bytes, only
from headroom.contract.kube import Pod
from headroom.core.placement.device_accounting import DeviceTerms, first_of_each_memory
from headroom.core.placement.fit import Verdicts, fit
from headroom.core.placement.request import VramRequest
from headroom.core.placement.snapshot import REASONS, Snapshot
from headroom.core.placement.visible_devices import Visible
from headroom.core.preemption.evictable_pods import Needs, as_evictable, leaving, left_bytes
from headroom.core.preemption.victim_search import SOON_S
from headroom.core.rules.pod_requests import demands
from headroom.core.whatif.node_whatif import rejection_beside
from headroom.core.whatif.simulation import NotPlaced, Simulation

#: Maximum number of pods to move for a waiting pod, and to free a node.
MOST_FOR_A_POD, MOST_OF_A_NODE = 4, 64
#: Maximum number of nodes that are examined. For a pod, nodes with the most headroom come first. To
#: free a node, nodes with the fewest pods come first.
MOST_NODES = 512
#: Maximum number of what-if computations of one search. Each takes about a millisecond.
MOST_TRIES = 4000


@dataclass(slots=True)
class Effort:
    """Limits one search and counts its work. ``is_over`` returns whether the search has
    used up its time."""

    is_over: Callable[[], bool] = lambda: False
    tries_left: int = MOST_TRIES
    #: Number of nodes that were examined.
    nodes: int = 0
    #: Whether the search ended before it had examined everything.
    cut_short: bool = False

    @property
    def is_used_up(self) -> bool:
        self.cut_short = self.cut_short or self.tries_left <= 0 or self.is_over()
        return self.cut_short

    def examines(self, number: int) -> bool:
        """Count one more node, after ``number`` others, and return whether to examine it."""
        self.cut_short = self.cut_short or number >= MOST_NODES
        self.nodes += not self.is_used_up
        return not self.cut_short


@dataclass(frozen=True, slots=True)
class Advice:
    """The result for one waiting pod or one node.

    ``outcome`` is "fits" if the pod fits on ``node`` now, and "free" if the GPUs of ``node`` hold
    no pod. It is "soon" if this becomes true when terminating pods have ended, "move" if it becomes
    true after ``moves``, and "none" if no set of moves was found.
    """

    outcome: Literal["fits", "free", "soon", "move", "none"]
    node: str = ""
    #: The moves in the order of the evictions.
    moves: tuple[Move, ...] = ()
    #: The devices that the waiting pod could get, or the devices that become free.
    devices: tuple[str, ...] = ()
    #: The memory that the waiting pod gets, or the headroom of the devices that become free.
    gain_bytes: int = 0
    #: For each reason, the number of pods on the examined nodes that are not moved for this reason.
    stay: Mapping[Stays, int] = field(default_factory=dict)


def for_pod(movers: Movers, pod: Pod, effort: Effort, name: str = "") -> Advice:
    """Return the fewest moves after which an unbound pod fits on any node, or on the node ``name``.

    The pod must request a GPU, and its request must be readable. The named node may be cordoned,
    which keeps successors from coming back to it while pods move.
    """
    state, snap, now_s = movers.state, movers.snap, movers.now_s
    request, where = state.understand(pod), movers.eligible(pod)
    assert isinstance(request, VramRequest)
    if name:
        row = snap.row_of[name]
        others = (each.code != "cordoned" for each in where.obstacles.get(row, ()))
        where = only([] if any(others) else [row])
    if places := Simulation(state, snap, now_s).places(request, where):
        return Advice("fits", places[0])
    found, stay = list[_Candidate](), Counter[Stays]()
    verdicts = fit(request, snap, where.rows, now_s)
    for number, candidate in enumerate(_candidates(movers, pod, request, verdicts)):
        if not effort.examines(number):
            break
        if candidate.going and candidate.helps(frozenset()):
            return Advice("soon", candidate.name)
        stay.update(candidate.stay)
        found.append(candidate)
    found.sort(key=lambda each: (each.least, each.name))
    for size in range(1, MOST_FOR_A_POD + 1):
        for candidate in found:
            if candidate.least > size:
                break
            for pods in combinations(candidate.movable, size):
                if effort.is_used_up:
                    return Advice("none", stay=stay)
                if advice := _moving(candidate, pods, effort, stay):
                    return advice
    return Advice("none", stay=stay)


def _moving(
    candidate: "_Candidate", pods: Sequence[Pod], effort: Effort, stay: Mapping[Stays, int]
) -> Advice | None:
    """Return the advice to move exactly these pods, or None if that does not help."""
    uids = frozenset(pod.metadata.uid for pod in pods)
    if not candidate.may_help(uids):
        return None
    effort.tries_left -= 1
    if not candidate.helps(uids):
        return None
    movers, name = candidate.movers, candidate.name
    simulation = _without(movers, candidate.going)
    moves = movers.moved(simulation, name, pods)
    if moves is None:
        return None
    placed = simulation.place(candidate.request, only([movers.snap.row_of[name]]))
    if isinstance(placed, NotPlaced):
        return None
    charges = placed.placement.charges
    devices = {uuid for each in charges for uuid in each.candidates if uuid not in each.beyond}
    gain_bytes = sum(map(charged_bytes, charges))
    return Advice("move", name, moves, tuple(sorted(devices)), gain_bytes, stay)


def for_node(movers: Movers, effort: Effort, name: str = "") -> Advice:
    """Return the fewest moves after which the GPUs of a node hold no pod.

    ``name`` is a node in the snapshot. If it is empty, the search covers all nodes that take pods
    and hold some, and returns the node that needs the fewest moves.
    """
    stay = Counter[Stays]()
    nodes = sorted(_with_pods(movers, name), key=lambda each: (len(each[1]), each[0]))
    if name and not nodes:
        return Advice("free", name)
    for number, (node, uids) in enumerate(nodes):
        if not effort.examines(number):
            break
        going = leaving(movers.state, node, movers.now_s, SOON_S)
        if not uids - going:
            return Advice("soon", node)
        pods = [pod for uid in uids - going if (pod := movers.state.pod(uid)) and pod.node == node]
        why = [movers.why_stays(pod) for pod in pods]
        stay.update(filter(None, why))
        # If pods are missing here, a reservation may belong to a pod that is being bound right now.
        if any(why) or len(pods) < len(uids - going) or len(pods) > MOST_OF_A_NODE:
            continue
        effort.tries_left -= 1
        simulation = _without(movers, going)
        moves = movers.moved(simulation, node, pods)
        if moves is not None:
            return Advice("move", node, moves, *_free(simulation.snapshot(), node), stay)
        stay[Stays.PLACES] += len(pods)
    return Advice("none", name, stay=stay)


def _with_pods(movers: Movers, name: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the nodes whose GPUs hold pods, with the uids of these pods."""
    state, snap = movers.state, movers.snap
    for terms in snap.nodes if not name else [snap.nodes[snap.row_of[name]]]:
        takes_pods = terms.reason is None and terms.fresh_until_s >= movers.now_s
        gpunode = state.gpunode(terms.name)
        if gpunode is None or not (takes_pods or name):
            continue
        unreserved = {pod.metadata.uid for pod in state.unreserved_pods(terms.name)}
        bound = state.holds.binding_to(terms.name)
        if uids := {*gpunode.spec.reservations, *bound, *unreserved}:
            yield terms.name, uids


def _free(snap: Snapshot, name: str) -> tuple[tuple[str, ...], int]:
    """Return the devices of a node that take pods, and their headroom in bytes."""
    terms = [each for each in snap.nodes[snap.row_of[name]].devices if each.health_issue is None]
    headroom_bytes = sum(max(0, each.headroom_bytes) for each in first_of_each_memory(terms))
    return tuple(each.device.uuid for each in terms), headroom_bytes


def _without(movers: Movers, going: set[str]) -> Simulation:
    """Return a simulation without the pods that are terminating."""
    simulation = Simulation(movers.state, movers.snap, movers.now_s)
    for uid in sorted(going):
        simulation.release(uid)
    return simulation


def _candidates(
    movers: Movers, pod: Pod, request: VramRequest, verdicts: Verdicts
) -> Iterator["_Candidate"]:
    """Yield the nodes on which ending pods may help, the node with the most headroom first."""
    snap, rows = verdicts.snap, verdicts.rows
    held_for, asked = movers.state.holds.nominees_before(pod, movers.now_s), demands(pod)
    helped = [i for i, code in enumerate(verdicts.codes.tolist()) if _helped(code)]
    for i in sorted(helped, key=lambda i: -int(snap.node_headroom_bytes[rows[i]])):
        terms = snap.nodes[int(rows[i])]
        nominees = held_for.get(terms.name, [])
        yield _Candidate(
            movers,
            request,
            terms.name,
            terms.devices,
            [each.need_bytes[i].tolist() for each in verdicts.asks],
            nominees,
            Needs(movers.state, terms.name, asked, (), nominees),
            pod.priority,
        )


def _helped(code: int) -> bool:
    """Return whether evicting pods could resolve the reason with this code."""
    reason = REASONS[code]
    return reason is not None and reason.evictable


class _Candidate:
    """A node on which moves may make the pod fit."""

    def __init__(
        self,
        movers: Movers,
        request: VramRequest,
        name: str,
        devices: Sequence[DeviceTerms],
        needed_bytes: Sequence[Sequence[int]],
        nominees: Sequence[Pod],
        needs: Needs,
        most_priority: int,
    ) -> None:
        """``needed_bytes`` has the bytes that the pod needs on each device, for each container.
        ``nominees`` are the pods for which memory of the node is held."""
        self.movers, self.request, self.name = movers, request, name
        self._devices, self._needed_bytes = devices, needed_bytes
        self._nominees, self._needs = nominees, needs
        #: Uids of pods that are ending already.
        self.going = leaving(movers.state, name, movers.now_s, SOON_S)
        #: Number of pods that are not moved, by reason.
        self.stay = Counter[Stays]()
        self.movable: list[Pod] = []
        for pod in movers.state.pods_on(name):
            if pod.metadata.uid in self.going:
                continue
            if why := movers.why_stays(pod, most_priority):
                self.stay[why] += 1
            else:
                self.movable.append(pod)
        self.movable.sort(
            key=lambda pod: (pod.priority, -as_evictable(pod).started_s, pod.metadata.uid)
        )
        #: Lower bound of the number of moves; above ``MOST_FOR_A_POD`` if moving pods cannot help.
        self.least = self._least()

    def _least(self) -> int:
        if not self.movable:
            return MOST_FOR_A_POD + 1
        if self.request.visible is not Visible.BY_PLUGIN:
            return 1  # the pod could get any device
        uids = {pod.metadata.uid for pod in self.movable}
        least = 1
        for ask, needs in zip(self.request.asks, self._needed_bytes, strict=True):
            counts = [
                count
                for terms, need_bytes in zip(self._devices, needs, strict=False)
                if terms.device.resource == ask.resource
                and (count := self._least_on(terms, need_bytes, uids)) is not None
            ]
            least = max(least, min(counts, default=MOST_FOR_A_POD + 1))
        return least

    def _least_on(self, terms: DeviceTerms, need_bytes: int, movable: set[str]) -> int | None:
        """Return the minimum number of pods that must leave the device, or None if the device never
        has enough memory."""
        staying = [h for h in terms.holders if h.observed and h.uid not in self.going]
        freed_bytes = sorted((h.charged_bytes for h in staying if h.uid in movable), reverse=True)
        if not terms.common:
            return len(staying) if len(freed_bytes) == len(staying) else None
        missing_bytes = need_bytes - left_bytes(terms, self.going)
        sums = [0, *accumulate(freed_bytes)]
        return next((n for n, freed in enumerate(sums) if freed >= missing_bytes), None)

    def may_help(self, uids: frozenset[str]) -> bool:
        """Return whether moving the pods may free enough memory. This check is cheap."""
        gone = uids | self.going
        return self._needs.met(gone) and (
            self.request.visible is not Visible.BY_PLUGIN
            or all(
                any(
                    terms.device.resource == ask.resource and left_bytes(terms, gone) >= need_bytes
                    for terms, need_bytes in zip(self._devices, needs, strict=False)
                )
                for ask, needs in zip(self.request.asks, self._needed_bytes, strict=True)
            )
        )

    def helps(self, uids: frozenset[str]) -> bool:
        """Return whether the pod fits on the node without these pods and without the pods that are
        ending."""
        movers, gone = self.movers, uids | self.going
        return not rejection_beside(
            movers.state, self.request, self.name, self._nominees, movers.now_s, gone
        )
