"""Fits pods on hypothetical nodes, such as nodes that pods have left, nodes with additional pods,
and new nodes.

``pod_counts`` counts how many equal pods fit on a node now, by adding reservations for them to a
copy, because a division of the free memory would ignore which devices the pods get. The pods count
as unconfirmed, as in a burst.

``codes_of_new`` fits a pod on nodes that are not in the cluster yet, such as an autoscaler's
templates. A new node is empty and no agent can have measured it, so its labels are enough even with
``require_report``. After the node has been created, a bind requires the agent's report.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

import msgspec
import numpy as np

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
from headroom.core.placement.placement_record import place
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import Unreadable, VramRequest
from headroom.core.placement.snapshot import CODE_OF, NodeTerms
from headroom.core.placement.snapshot_builder import build

#: Maximum number of templates that one call examines. Other templates count as unknown nodes.
MOST_NODES = 100


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
    for i in positions:
        node = verdicts.snap.nodes[int(verdicts.rows[i])].name
        gpunode = cluster.gpunode(node)
        if gpunode is not None:
            if held := verdicts.snap.held.get(node):
                reservations = {**held, **gpunode.spec.reservations}
                spec = msgspec.structs.replace(gpunode.spec, reservations=reservations)
                gpunode = msgspec.structs.replace(gpunode, spec=spec)
            limit = _replicas(verdicts, i) // verdicts.asks[0].ask.count
            guess = _guess(verdicts, i)
            yield i, count_pods(cluster, gpunode, verdicts.request, limit, verdicts.now_s, guess)


def count_pods(
    cluster: Cluster,
    gpunode: GPUNode,
    request: VramRequest,
    limit: int,
    now_s: float,
    guess: int = 0,
) -> int:
    """Return how many pods fit on this version of the GPUNode.

    ``limit`` is the maximum that the free replicas allow, and ``guess`` the number to try first.

    Equal pods have equal reservations, so many of them are added at once, and a binary search finds
    the number. But if Headroom chooses a device for each pod, a reservation depends on the previous
    one, so they are added one by one.
    """
    current = gpunode
    reservation = _reserve(cluster, current, request, now_s)
    if reservation is None or limit < 1:
        return 0
    if any(charge.choices or charge.by_environment for charge in reservation.charges):
        count = 0
        while reservation is not None and count < limit:
            current, count = _with(current, [reservation], count), count + 1
            reservation = _reserve(cluster, current, request, now_s)
        return count

    def fits(count: int) -> bool:
        before = _with(gpunode, [reservation] * (count - 1), 0)
        return _reserve(cluster, before, request, now_s) is not None

    low, high = 1, limit
    for count in (min(guess, limit), guess + 1):
        if low < count <= high:
            low, high = (count, high) if fits(count) else (low, count - 1)
    return low + bisect_left(range(low + 1, high + 1), True, key=lambda count: not fits(count))


def _reserve(
    cluster: Cluster, gpunode: GPUNode, request: VramRequest, now_s: float
) -> Reservation | None:
    """Return the reservation that one more pod would get, or None if it does not fit."""
    verdicts = _fit_on(cluster.weighed(gpunode), request, now_s)
    if not verdicts.fits[0]:
        return None
    charges = place(request, verdicts.snap, verdicts, 0).charges
    return Reservation(request.namespace, request.name, list(charges))


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
