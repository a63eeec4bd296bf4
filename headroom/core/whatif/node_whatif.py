"""Fits pods on hypothetical nodes, such as nodes that pods have left, nodes with additional pods,
and new nodes.

``pod_counts`` counts how many equal pods fit on a node now, by adding reservations for them to a
copy, because a division of the free memory would ignore which devices the pods get. The pods count
as unconfirmed, as in a burst. If Headroom chooses their devices, each pod gets its devices before
the next pod is placed.

``codes_of_new`` fits a pod on nodes that are not in the cluster yet, such as an autoscaler's
templates. A new node is empty and no agent can have measured it, so its labels are enough even with
``require_report``. After the node has been created, a bind requires the agent's report.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from headroom.contract.annotations import ScoringPolicy
from headroom.contract.gpunode import (
    MAX_REPLICAS,
    SM_SOURCES,
    GPUNode,
    GPUNodeSpec,
    Reservation,
    SmActivity,
)
from headroom.contract.kube import Node, NodeStatus, ObjectMeta, Pod
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, NodeSeen
from headroom.core.cluster.changes import Event
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.label_inventory import believed
from headroom.core.cluster.object_cache import NOTHING
from headroom.core.placement.device_accounting import without
from headroom.core.placement.fit import Codes, Verdicts, fit
from headroom.core.placement.fit_cache import NEVER_STALE_S
from headroom.core.placement.placement_record import charges
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import Unreadable, VramRequest
from headroom.core.placement.snapshot import CODE_OF, NodeTerms
from headroom.core.placement.snapshot_builder import build
from headroom.core.whatif.simulated_reports import chosen_replicas, with_pod

#: Maximum number of templates that one call examines. Other templates count as unknown nodes.
MOST_NODES = 100
#: Maximum number of nodes whose pods are counted together.
_MOST_AT_ONCE = 500


def rejection_beside(
    state: Cluster,
    request: VramRequest | Unreadable,
    node: str,
    assumed_pods: Iterable[Pod],
    now_s: float,
    gone: Set[str] = frozenset(),
    held: Mapping[str, Reservation] = NOTHING,
) -> Reason | None:
    """Return why a pod would not fit on the node beside additional pods, or None if it would fit.

    ``assumed_pods`` count as being bound to the node, and the reservations in ``held`` (by uid) as
    being written. The pods with the uids in ``gone`` have left, so their memory is free.
    """
    if isinstance(request, Unreadable):
        return request.reason
    gpunode = state.gpunode(node)
    if gpunode is not None:
        reservations = ((p.metadata.uid, state.adopt(p, gpunode)) for p in assumed_pods)
        held = {**held, **{uid: found for uid, found in reservations if found is not None}}
    terms = terms_beside(state, node, held, gone | {request.uid}, gone)
    return _fit_on(terms, request, now_s).reason(0)


def terms_beside(
    state: Cluster,
    node: str,
    held: Mapping[str, Reservation],
    excluded: Set[str],
    gone: Set[str] = frozenset(),
) -> NodeTerms:
    """Return the terms of a node as if the reservations in ``held`` (by uid) were being written to
    it.

    Reservations of the pods with the uids in ``excluded`` do not count. The pods in ``gone`` have
    also left their devices.
    """
    gpunode, assumed = state.gpunode(node), {**held, **state.holds.binding_to(node)}
    if gone and gpunode is not None and gpunode.status is not None:
        gpunode = msgspec.structs.replace(gpunode, status=without(gpunode.status, gone))
    assumed = {uid: reservation for uid, reservation in assumed.items() if uid not in gone}
    return state.terms_of(node, gpunode, excluded, assumed)


def _fit_on(terms: NodeTerms, request: VramRequest, now_s: float) -> Verdicts:
    return fit(request, build([terms]), np.zeros(1, np.int64), now_s)


def pod_counts(
    cluster: Cluster, verdicts: Verdicts, positions: Iterable[int]
) -> Iterator[tuple[int, int]]:
    """Yield (position, number of pods that fit) for these positions in the verdicts.

    At least one pod must fit at each position.
    """
    request, now_s = verdicts.request, verdicts.now_s
    found: dict[int, _Search] = {}
    for i in positions:
        on_node = verdicts.snap.nodes[int(verdicts.rows[i])]
        gpunode = cluster.gpunode(node := on_node.name)
        if gpunode is None:
            continue
        if held := verdicts.snap.held.get(node):
            reservations = {**held, **gpunode.spec.reservations}
            spec = msgspec.structs.replace(gpunode.spec, reservations=reservations)
            gpunode = msgspec.structs.replace(gpunode, spec=spec)
        limit = _replicas(verdicts, i) // verdicts.asks[0].ask.count
        made = charges(request, verdicts.snap, verdicts, i)
        first = Reservation(request.namespace, request.name, list(made))
        if _depends_on_previous(first):
            yield i, count_pods(cluster, gpunode, request, limit, now_s)
            continue
        guess = _guess(verdicts, i)
        if not any(terms.crowd_bytes for terms in on_node.devices):
            # Without unconfirmed pods, no choice of the plugin lets more pods fit than a free
            # choice of their devices.
            limit = min(limit, max(guess, 1))
        found[i] = _Search(gpunode, first, limit, guess)
        if len(found) == _MOST_AT_ONCE:
            yield from _counts(cluster, request, found, now_s)
            found.clear()
    yield from _counts(cluster, request, found, now_s)


def count_pods(
    cluster: Cluster, gpunode: GPUNode, request: VramRequest, limit: int, now_s: float
) -> int:
    """Return how many pods fit on this version of the GPUNode.

    ``limit`` is the maximum that the free replicas allow.
    """
    first = _fitted(cluster, gpunode, request, now_s)
    if first is None or limit < 1:
        return 0
    reservation = first.reservation
    if any(charge.choices for charge in reservation.charges):
        return _count_chosen(cluster, gpunode, request, limit, now_s)
    if _depends_on_previous(reservation):
        more: _Fitted | None = first
        count, current = 0, gpunode
        while more is not None and count < limit:
            current, count = _with(current, [more.reservation], count), count + 1
            more = _fitted(cluster, current, request, now_s)
        return count
    search = {0: _Search(gpunode, reservation, limit, 0)}
    return next(count for _, count in _counts(cluster, request, search, now_s))


def _depends_on_previous(reservation: Reservation) -> bool:
    """Return whether an equal pod would have another reservation after this pod was placed,
    because Headroom or the pod chooses its devices."""
    return any(charge.choices or charge.by_environment for charge in reservation.charges)


class _Search:
    """A binary search for the number of equal pods that fit on a node.

    Equal pods have equal reservations, so many of them are added at once.
    """

    def __init__(self, gpunode: GPUNode, reservation: Reservation, limit: int, guess: int) -> None:
        """Begin with a node on which one pod fits.

        ``limit`` is the maximum that the free replicas allow, and ``guess`` the number to try
        first.
        """
        self._gpunode, self._reservation = gpunode, reservation
        #: The largest number that is known to fit, and the largest that could fit.
        self._low, self._high = min(1, limit), limit
        #: Numbers to try before the middle, the first last.
        self._guesses = [guess + 1, min(guess, limit)]

    def next_count(self) -> int | None:
        """Return the number to try next, or None if the result is known."""
        while self._guesses:
            count = self._guesses.pop()
            if self._low < count <= self._high:
                return count
        return (self._low + self._high + 1) // 2 if self._low < self._high else None

    def before(self, count: int) -> GPUNode:
        """Return the GPUNode with one pod less than ``count``."""
        return _with(self._gpunode, [self._reservation] * (count - 1), 0)

    def tried(self, count: int, fits: bool) -> None:
        self._low, self._high = (count, self._high) if fits else (self._low, count - 1)

    @property
    def result(self) -> int:
        return self._low


def _counts(
    cluster: Cluster, request: VramRequest, searches: Mapping[int, _Search], now_s: float
) -> Iterator[tuple[int, int]]:
    """Yield (key, number of pods that fit). All searches try their next number together, because
    fitting many nodes in one call takes hardly longer than fitting one."""
    remaining = [*searches.values()]
    while tries := [(s, count) for s in remaining if (count := s.next_count()) is not None]:
        terms = []
        for search, count in tries:
            gpunode = search.before(count)
            assumed = cluster.holds.binding_to(gpunode.name)
            terms.append(cluster.terms_of(gpunode.name, gpunode, assumed=assumed))
        verdicts = fit(request, build(terms), np.arange(len(terms)), now_s)
        for (search, count), fits in zip(tries, verdicts.fits.tolist(), strict=True):
            search.tried(count, fits)
        remaining = [search for search, _ in tries]
    for key, search in searches.items():
        yield key, search.result


def _count_chosen(
    cluster: Cluster, gpunode: GPUNode, request: VramRequest, limit: int, now_s: float
) -> int:
    """Return how many pods fit if Headroom chooses their devices.

    Each pod gets its devices before the next pod is placed, because until then a steered node takes
    only pods for the same devices.
    """
    count, added = 0, dict[str, Reservation]()
    while count < limit:
        found = _fitted(cluster, gpunode, request, now_s, added)
        if found is None or gpunode.status is None:
            break
        status = gpunode.status
        count_of = chosen_replicas(found.reservation.charges)
        for _ in range(min(found.equal_pods(count_of), limit - count)):
            uid = f"count-{count}"
            status = with_pod(status, uid, count_of)
            added[uid], count = found.reservation, count + 1
        spec = msgspec.structs.replace(
            gpunode.spec, reservations={**gpunode.spec.reservations, **added}
        )
        gpunode = msgspec.structs.replace(gpunode, spec=spec, status=status)
    return count


@dataclass(frozen=True, slots=True)
class _Fitted:
    """One more pod that fits on the node."""

    reservation: Reservation
    verdicts: Verdicts

    def equal_pods(self, count_of: Mapping[str, int]) -> int:
        """Return how many equal pods filter would place on the same devices one after another.

        ``count_of`` contains the replicas of each device that one pod takes. Except with the policy
        spread, filter prefers the same devices until they are full. The order does not matter for
        pods with one device.
        """
        verdicts = self.verdicts
        one_device = all(verdict.ask.widest == 1 for verdict in verdicts.asks)
        if verdicts.request.policy is ScoringPolicy.SPREAD and not one_device:
            return 1
        devices, sizes = verdicts.snap.nodes[0].devices, list[int]()
        for verdict in verdicts.asks:
            for slot in np.flatnonzero(verdict.candidates[0]).tolist():
                term = devices[slot]
                if term.sharers > 1:
                    return 1  # Another device of the pod can use the same memory.
                need_bytes = max(1, int(verdict.need_bytes[0, slot]))
                sizes.append(int(verdict.free_bytes[0, slot]) // need_bytes)
                sizes.append(term.device.replicas.free // max(1, count_of[term.device.uuid]))
        return max(1, min(sizes))


def _fitted(
    cluster: Cluster,
    gpunode: GPUNode,
    request: VramRequest,
    now_s: float,
    added: Mapping[str, Reservation] = NOTHING,
) -> _Fitted | None:
    """Fit one more pod, and return None if it does not fit.

    ``added`` contains reservations of pods that have their devices but are not in the cluster.
    """
    assumed = {**cluster.holds.binding_to(gpunode.name), **added}
    terms = cluster.terms_of(gpunode.name, gpunode, assumed=assumed)
    verdicts = _fit_on(terms, request, now_s)
    if not verdicts.fits[0]:
        return None
    made = charges(request, verdicts.snap, verdicts, 0)
    return _Fitted(Reservation(request.namespace, request.name, list(made)), verdicts)


def _with(gpunode: GPUNode, reservations: list[Reservation], first: int) -> GPUNode:
    """Return the GPUNode with more reservations, for pods numbered from ``first``."""
    more = {f"count-{first + n}": reservation for n, reservation in enumerate(reservations)}
    spec = msgspec.structs.replace(gpunode.spec, reservations={**gpunode.spec.reservations, **more})
    return msgspec.structs.replace(gpunode, spec=spec)


def _replicas(verdicts: Verdicts, i: int) -> int:
    """Return the number of replicas that pods could get on the node, over all devices."""
    columns, row = verdicts.snap.columns, int(verdicts.rows[i])
    slots = columns.resource[row] == verdicts.snap.resources[verdicts.asks[0].ask.resource]
    free = columns.replicas_free[row][slots].sum(dtype=np.int64)
    return int(free - columns.replicas_unconfirmed[row][slots].max(initial=0))


def _guess(verdicts: Verdicts, i: int) -> int:
    """Return how many pods would fit if their devices could be chosen, which is a good first
    guess."""
    verdict, row = verdicts.asks[0], int(verdicts.rows[i])
    need_bytes, free_bytes = verdict.all_need_bytes[row], verdict.all_free_bytes[row]
    sizes = np.clip(free_bytes // np.maximum(need_bytes, 1), 0, MAX_REPLICAS)
    return int(sizes.sum()) // verdict.ask.count


class _Status(NodeStatus, frozen=True):
    capacity: Mapping[str, str | int] | None = None


class _Node(Node, frozen=True):
    status: _Status | None = None


_decode = msgspec.json.Decoder(_Node).decode


def codes_of_new(items: Sequence[msgspec.Raw], request: VramRequest, rules: Rules) -> Codes:
    """Return the code of each node's reason, which is 0 if the pod fits. Invalid nodes count as
    unknown."""
    codes = np.full(len(items), CODE_OF[Reason.UNKNOWN_NODE], np.int8)
    decoded = {}
    for i, item in enumerate(items[:MOST_NODES]):
        try:
            decoded[i] = _decode(item)
        except (ValueError, RecursionError):  # msgspec raises UnicodeDecodeError too
            continue
    rules = replace(rules, require_report=False)
    writer = ClusterWriter(rules, 0.0, 0.0)
    writer.apply(e for node in decoded.values() for e in _as_ready(node, rules))
    snap = writer.cluster.snapshot()
    rows = snap.rows([node.metadata.name for node in decoded.values()])
    codes[list(decoded)] = fit(request, snap, rows, NEVER_STALE_S).codes
    return codes


def _as_ready(node: _Node, rules: Rules) -> tuple[Event, ...]:
    """Return the events of an idle node whose agent has reported exactly the content of its
    labels."""
    status = node.status
    if status is not None and status.allocatable is None:  # Kubernetes' own default
        status = msgspec.structs.replace(status, allocatable=status.capacity)
    node = msgspec.structs.replace(node, status=status)
    report = believed(node, rules)
    if report is not None:
        none = SmActivity(0.0, SM_SOURCES[0])
        idle = [msgspec.structs.replace(each, sm_activity=none) for each in report.devices]
        report = msgspec.structs.replace(report, devices=idle)
    metadata, spec = ObjectMeta(name=node.metadata.name), GPUNodeSpec(initialised=True)
    return NodeSeen(node), GPUNodeSeen(GPUNode(metadata=metadata, spec=spec, status=report), 0.0)
