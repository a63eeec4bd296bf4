"""Decides on which nodes a pod fits. It must fit on every candidate device of the node."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headroom.contract.reasons import Reason
from headroom.core.placement.amounts import DeviceArrays, above_cap, needed
from headroom.core.placement.chosen_device import (
    Candidates,
    Nodes,
    at_least,
    candidates_by_environment,
    steered_candidates,
)
from headroom.core.placement.device_accounting import Several
from headroom.core.placement.dra_nodes import served
from headroom.core.placement.occupancy import Starting
from headroom.core.placement.request import Ask, VramRequest
from headroom.core.placement.snapshot import (
    CODE_OF,
    REASONS,
    SHARING,
    Bytes2D,
    Columns,
    Int2D,
    Mask,
    Rows,
    Snapshot,
)
from headroom.core.placement.visible_devices import Visible

Codes = NDArray[np.int8]

#: Health issues for which a node rejects pods, in order of precedence.
_HEALTH_ISSUES = (
    Reason.CONTRADICTORY_REPORT,
    Reason.MEMORY_UNKNOWN,
    Reason.UNHEALTHY_DEVICE,
    Reason.COMPUTE_MODE,
    Reason.CORDONED_DEVICE,
)


@dataclass(frozen=True, slots=True, eq=False)
class AskVerdict:
    """The comparison of one ask with every node.

    ``all_*`` arrays cover all nodes of the snapshot, because it would cost more to select the
    requested rows of every column before the computation. The properties cover only the n requested
    rows.
    """

    ask: Ask
    rows: Rows
    #: (nodes,) code of the first reason, or 0 if the ask fits.
    all_codes: Codes
    #: (nodes, slots) whether the device is advertised as the resource of the ask.
    all_slots: Mask
    #: (nodes, slots)
    all_candidates: Mask
    #: (nodes, slots) the devices from which Headroom chooses the candidates. They equal the
    #: candidates if the plugin or the pod chooses.
    all_choosable: Mask
    all_need_bytes: Bytes2D
    all_free_bytes: Bytes2D
    #: (nodes,) whether Headroom chooses the device instead of the plugin.
    all_ours: Nodes
    #: (nodes,) whether a reason holds, for each reason that may hold for some node, in the order of
    #: precedence. Only explanations need it.
    all_rejected: Mapping[Reason, Nodes]

    @property
    def candidates(self) -> Mask:
        """The candidate devices, (n, slots)."""
        return self.all_candidates[self.rows]

    @property
    def choosable(self) -> Mask:
        """The devices from which the candidates are chosen, (n, slots)."""
        return self.all_choosable[self.rows]

    @property
    def need_bytes(self) -> Bytes2D:
        """Maximum number of bytes that the pod can take on each device, (n, slots)."""
        return self.all_need_bytes[self.rows]

    @property
    def free_bytes(self) -> Bytes2D:
        """The bytes that are free for the pod on each device, (n, slots)."""
        return self.all_free_bytes[self.rows]


@dataclass(frozen=True, slots=True, eq=False)
class Verdicts:
    """The verdict for each of the n requested rows, in the order of ``rows``."""

    request: VramRequest
    snap: Snapshot
    rows: Rows
    #: (n,) code of the first reason, or 0 if the pod fits.
    codes: Codes
    asks: tuple[AskVerdict, ...]
    #: Time of the extender's monotonic clock.
    now_s: float
    #: (n,) whether a reason holds, for each reason that concerns the pod and the whole node.
    closed: Mapping[Reason, Nodes] = field(default_factory=dict)
    #: (n,) whether kube-scheduler allocates the pod's GPUs on the node by DRA, without a
    #: reservation.
    by_dra: Mask = field(default_factory=lambda: np.zeros(0, bool))

    @property
    def fits(self) -> Mask:
        fits: Mask = self.codes == 0
        return fits

    def reason(self, i: int) -> Reason | None:
        return REASONS[int(self.codes[i])]

    def large_enough(self) -> Mask:
        """Return whether each node (n,) has large enough devices, so that the pod could fit if
        other pods left.

        A device of each requested resource must have as much allocatable memory as the pod needs.
        If Headroom chooses, as many devices as the pod gets must have it. Always return True if the
        pod's own variable may decide which devices it gets.
        """
        large = np.ones(len(self.rows), bool)
        if self.request.visible is Visible.BY_PLUGIN:
            for verdict in self.asks:
                large_devices = self.snap.columns.allocatable_bytes >= verdict.all_need_bytes
                enough = verdict.all_slots & large_devices
                found = np.asarray(enough.any(axis=1))
                if verdict.ask.widest > 1:
                    found &= ~verdict.all_ours | at_least(enough, verdict.ask.widest)
                large &= found.take(self.rows)
        return large


def fit(request: VramRequest, snap: Snapshot, rows: Rows, now_s: float) -> Verdicts:
    """Decide for each node whether the request fits.

    ``rows`` contains valid indices into the snapshot, int64 (n,), and the verdicts keep their
    order. ``now_s`` is the time of the extender's monotonic clock, which decides whether a report
    is stale. A pod never fits on a node with a stale report. A pod that requests no GPU fits on
    every node. Raises nothing.
    """
    if not request.asks:
        none = np.zeros(len(rows), bool)
        return Verdicts(request, snap, rows, none.astype(np.int8), (), now_s, by_dra=none)
    # With few nodes the number of numpy calls dominates the cost.
    codes = snap.node_reason.take(rows).astype(np.int8)
    by_dra = served(request, snap, rows, codes)
    ours = ~by_dra
    closed: dict[Reason, Nodes] = {
        Reason.STALE_REPORT: (snap.fresh_until_s.take(rows) < now_s) & ours
    }
    if request.visible is Visible.REJECTED:
        # The pod could use any device, whatever the plugin chooses. Such pods are rare, so the
        # snapshot has no column for this case.
        rejects = [snap.nodes[row].obeys_environment for row in rows.tolist()]
        closed[Reason.CHOOSES_DEVICES] = np.array(rejects, bool) & ours
    if not request.gated:
        # On a gated node only gates enforce the reservations. A pod without a gate could start on a
        # device without enough memory, or take memory reserved for another pod.
        closed[Reason.NO_GATE] = snap.gated.take(rows) & ours
    for reason, holds in closed.items():
        codes[(codes == 0) & holds] = CODE_OF[reason]
    asks = tuple(_fit_one(ask, request, snap, rows) for ask in request.asks)
    for verdict in asks:
        codes = np.where((codes == 0) & ours, verdict.all_codes.take(rows), codes)
        if by_dra.any():
            verdict.all_candidates[rows[by_dra]] = False
            verdict.all_choosable[rows[by_dra]] = False
    return Verdicts(request, snap, rows, codes, asks, now_s, closed, by_dra)


def _fit_one(ask: Ask, request: VramRequest, snap: Snapshot, rows: Rows) -> AskVerdict:
    """Compare one ask with every node of the snapshot. ``rows`` are the requested rows."""
    columns = snap.columns
    slots = snap.slots_of(ask.resource)
    # The plugin allocates only by replicas, regardless of memory and of the health in the report.
    candidates: Mask = slots & (columns.reach <= ask.count)
    sharing = columns.sharing
    sharers = columns.sharers.astype(np.int64)
    arrays = DeviceArrays(
        allocatable_bytes=columns.allocatable_bytes,
        replicas=columns.replicas.astype(np.int64),
        common=(sharing != SHARING.index("none")) | (sharers > 1),
        sharers=sharers,
        mps=sharing == SHARING.index("mps"),
    )
    need_bytes = needed(ask, request.asks, arrays)
    by_variable = request.visible is not Visible.BY_PLUGIN
    steered: Nodes = np.zeros(len(slots), bool)
    if not by_variable and columns.steered.max(initial=0) > 0:
        steered = np.asarray((slots & (columns.steered > 0)).any(axis=1))
    any_steered = bool(steered.any())
    #: Number of different devices that the pod gets on a steered node.
    width = ask.widest
    if width > 1 and any_steered:
        apart_bytes = needed(ask, request.asks, arrays, apart=True)
        need_bytes = np.where(steered[:, None], apart_bytes, need_bytes)
    free_bytes = columns.free_bytes if ask.count == 1 else columns.several_free_bytes
    # MEMORY_ON_ANY holds only if no device of the resource has enough memory, candidate or not.
    relevant = slots
    if by_variable:
        by_plugin = Candidates(candidates, need_bytes, free_bytes)
        found = candidates_by_environment(ask, request, snap, arrays, by_plugin)
        candidates, need_bytes, free_bytes = found.could, found.need_bytes, found.free_bytes
        relevant = candidates | slots
    enough_memory = free_bytes >= need_bytes
    free_replicas = (columns.replicas_free * slots).sum(axis=1)
    unconfirmed = np.where(slots, columns.replicas_unconfirmed, 0).max(axis=1, initial=0)

    # Each of these reasons rejects a node if it holds for at least one candidate device. Faults
    # that no device has are skipped.
    health_issue = columns.health_issue
    issues = _HEALTH_ISSUES if health_issue.any() else ()
    faults = {reason: health_issue == CODE_OF[reason] for reason in issues}
    if width > 1:
        faults[Reason.TOO_MANY_SHARED] = columns.several == Several.REJECTED
        faults[Reason.OTHERS_ARRIVING] = columns.several == Several.UNSETTLED
    mps = candidates & arrays.mps
    if mps.any():
        above = above_cap(ask, request.processes, columns.memory_bytes, arrays)
        faults[Reason.ABOVE_MPS_LIMIT] = mps & above
    if request.max_sm_ppm is not None:
        activity = columns.sm_ppm
        faults[Reason.SM_ABOVE_LIMIT] = (activity < 0) | (activity >= request.max_sm_ppm)
    #: (nodes, slots) whether another pod is starting alone on the device, or None if the pod need
    #: not wait.
    meets_starting = _meets_starting(ask, request, columns.starting)
    by_headroom, choosable = None, candidates
    if any_steered:
        usable = _usable(ask, columns, candidates)
        for fault in faults.values():
            usable &= ~fault
        left_bytes = free_bytes - need_bytes
        #: A pod without a reservation may hold a replica and use no memory yet.
        alone = columns.replicas_free == columns.replicas if ask.takes_whole_devices else None
        by_headroom = _choose(
            request, snap, width, candidates, usable, alone, left_bytes, meets_starting
        )
        choosable = np.where(steered[:, None], by_headroom.choosable, candidates)
        candidates = np.where(steered[:, None], by_headroom.candidates, candidates)
        relevant = np.where(steered[:, None], candidates, relevant)
    rejected = {
        Reason.NO_SUCH_RESOURCE: ~slots.any(axis=1),
        Reason.NO_REPLICA: free_replicas - unconfirmed < ask.count,
        **{reason: (candidates & fault).any(axis=1) for reason, fault in faults.items()},
    }
    if by_headroom is not None:
        stuck = steered & by_headroom.stuck
        arriving = stuck & (unconfirmed > 0)
        if Reason.OTHERS_ARRIVING in rejected:
            arriving |= rejected[Reason.OTHERS_ARRIVING]
        rejected[Reason.OTHERS_ARRIVING] = arriving
    rejected[Reason.MEMORY_ON_ANY] = ~(relevant & enough_memory).any(axis=1)
    if by_headroom is not None and width > 1:
        rejected[Reason.TOO_FEW_DEVICES] = steered & by_headroom.too_few_large
    rejected[Reason.MEMORY_ON_SOME] = (candidates & ~enough_memory).any(axis=1)
    # This reason comes last, because it resolves by itself.
    if meets_starting is not None:
        rejected[Reason.OTHER_STARTING] = (candidates & meets_starting).any(axis=1)
    codes = np.zeros(len(snap.nodes), np.int8)
    for reason, holds in reversed(rejected.items()):  # the first reason wins
        codes[holds] = CODE_OF[reason]
    if by_headroom is not None:
        # Memory is not the reason, because the devices with enough memory have too few free
        # replicas.
        replaced = (codes == 0) | (codes == CODE_OF[Reason.MEMORY_ON_SOME])
        codes[stuck & replaced] = CODE_OF[Reason.NO_REPLICA]
    return AskVerdict(
        ask, rows, codes, slots, candidates, choosable, need_bytes, free_bytes, steered, rejected
    )


def _usable(ask: Ask, columns: Columns, candidates: Mask) -> Mask:
    """Return the candidates on steered nodes that have enough free replicas for the pod."""
    free = columns.replicas_free - columns.replicas_unconfirmed
    usable: Mask = candidates & (free >= ask.most_on_device)
    # While pods are unconfirmed, any other pod must get exactly their set of devices.
    if ask.widest == 1:
        usable &= columns.steered <= 2
    else:
        usable &= (columns.steered == 1) | (columns.steered == 1 + ask.widest)
    return usable


@dataclass(frozen=True, slots=True, eq=False)
class _ByHeadroom:
    """The devices that Headroom chooses on steered nodes. Rows of other nodes are arbitrary."""

    candidates: Mask
    #: The devices from which it chooses them.
    choosable: Mask
    #: (nodes,) whether a node has too few devices with enough memory and free replicas.
    stuck: Nodes
    #: (nodes,) whether enough devices have free replicas and no fault, but too few of them have
    #: enough memory.
    too_few_large: Nodes


def _choose(
    request: VramRequest,
    snap: Snapshot,
    width: int,
    could: Mask,
    usable: Mask,
    alone: Mask | None,
    left_bytes: Bytes2D,
    meets_starting: Mask | None,
) -> _ByHeadroom:
    """Choose ``width`` devices on each steered node.

    If ``alone`` is given, the pod takes only devices of this mask, because no other pod holds them.
    """
    fitting = usable & (left_bytes >= 0)
    # With one device, MEMORY_ON_ANY covers this case.
    too_few_large = np.zeros(len(usable), bool)
    if width > 1:
        too_few_large = at_least(usable, width) & ~at_least(fitting, width)
    if alone is not None:
        usable, fitting = usable & alone, fitting & alone
    stuck = ~at_least(fitting, width)
    open_to_pod = usable if meets_starting is None else usable & ~meets_starting
    chosen, choosable = steered_candidates(request, snap, width, could, open_to_pod, left_bytes)
    if meets_starting is not None:
        # The pod fits, but must wait for the devices on which it fits.
        waits = ~stuck & ~at_least(open_to_pod & (left_bytes >= 0), width)
        chosen = np.where(waits[:, None], fitting, chosen)
        choosable = np.where(waits[:, None], fitting, choosable)
    return _ByHeadroom(chosen, choosable, stuck, too_few_large)


def _meets_starting(ask: Ask, request: VramRequest, starting: Int2D) -> Mask | None:
    """Return the mask (nodes, slots) of devices on which another pod is starting alone.

    Return None if the pod itself does not start alone.
    """
    if not request.starts_alone:
        return None
    if request.visible is not Visible.BY_PLUGIN:
        least = Starting.BY_ENVIRONMENT
    else:
        least = Starting.ANY_POD if ask.count == 1 else Starting.SEVERAL
    return starting >= least
