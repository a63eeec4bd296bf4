"""Records the history of devices and pods from the reports that the watches deliver.

It reads the cluster state in memory and sends nothing to the API server. Every ``RESOLUTION_S`` it
compares the nodes with the previous round, a few at a time, and adds a row for each node that
changed.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from headroom.console.facts.gpu_pods import unconfirmed_by_model
from headroom.console.history.growth import Growing, growing
from headroom.console.history.history import (
    DEVICE_COLUMNS,
    RESOLUTION_S,
    UNIT_BYTES,
    UNIT_RATIO,
    UNKNOWN,
    History,
    Layout,
    PodOn,
    Totals,
)
from headroom.console.history.holdings import Held, Holdings, limited, of_node
from headroom.contract.gpunode import GPUNode, GPUNodeStatus
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.device_accounting import first_of_each_memory
from headroom.core.placement.per_node import PerNode, Sums
from headroom.core.placement.snapshot import NodeTerms, Snapshot
from headroom.runtime.loops import Loops

#: Number of nodes that are recorded before the event loop serves other tasks.
AT_ONCE = 10
#: Number of rounds between two searches for growing devices and old rows: half a minute.
CHORES_EVERY = 3
#: Number of sums that a node has: the fields of ``Totals`` from ``allocatable_bytes`` to
#: ``overcommitted_devices``.
SUMS = 6


class HistoryRecorder:
    """Adds rows to ``history``."""

    def __init__(self, cluster: Cluster, history: History, wall_s: Callable[[], float]) -> None:
        self._cluster = cluster
        self._wall_s = wall_s
        self.history = history
        #: The devices of each node whose use grows. The mapping is replaced as a whole.
        self.growing: Mapping[str, tuple[Growing, ...]] = {}
        #: The values of ``Totals`` of each node, under one key, and the holdings of its namespaces.
        self._nodes = PerNode[tuple[Mapping[str, Sequence[int]], Held]]()
        self._sums, self._held_sums = Sums[str, int](), Sums[str, float]()
        #: The holdings of each namespace, summed over all nodes. The dict is replaced as a whole.
        self.held: Held = {}
        self._rounds = 0

    def start(self, loops: Loops, begun: asyncio.Event) -> None:
        """Start the loop. It records nothing until ``begun`` is set."""

        async def record() -> None:
            if begun.is_set():
                for _ in self.record(asyncio.get_running_loop().time()):
                    await asyncio.sleep(0)

        loops.start("history", record, RESOLUTION_S)

    def record(self, now_s: float) -> Iterator[None]:
        """Record the changes since the last round. Other tasks may run between two steps.

        ``now_s`` is the monotonic time.
        """
        step = int(self._wall_s() // RESOLUTION_S)
        cluster, snap = self._cluster, self._cluster.snapshot()
        changes = self._nodes.update(
            snap,
            # A heartbeat replaces the terms of the node but keeps the terms of its devices.
            lambda node: (cluster.gpunode(node.name), node.fresh_until_s >= now_s, node.devices),
            partial(self._add, step),
            now_s,
        )
        for number, (name, before, after) in enumerate(changes, 1):
            self._sums.replace(before and before[0], after and after[0])
            self._held_sums.replace(before and before[1], after and after[1])
            if after is None:
                self.history.add(name, step, Layout(), ())
            if number % AT_ONCE == 0:
                yield
        if totals := self._sums.totals:
            pending = len(cluster.unbound())
            self.history.add_totals(Totals(*[step, *totals[""], pending]))
        yield
        held = self._held_sums.totals
        self.held = limited({namespace: Holdings(*each) for namespace, each in held.items()})
        self.history.held.add(self.held, self._wall_s(), now_s)
        yield
        self._rounds += 1
        if self._rounds % CHORES_EVERY == 0:
            self.history.forget(step)
            yield
            yield from self._find_growing(snap, step, now_s)

    def _add(
        self, step: int, node: NodeTerms, gpunode: GPUNode | None, fresh: bool, _: object
    ) -> tuple[Mapping[str, Sequence[int]], Held]:
        """Add a row for a node that changed. Return its values in the sums."""
        status = gpunode.status if gpunode and fresh else None
        self.history.add(node.name, step, *sample(node, status))
        held = of_node(self._cluster, gpunode, node.devices, fresh, self._wall_s())
        return {"": _sums(self._cluster, node)}, held

    def _find_growing(self, snap: Snapshot, step: int, now_s: float) -> Iterator[None]:
        found: dict[str, tuple[Growing, ...]] = {}
        for number, node in enumerate(snap.nodes, 1):
            if node.fresh_until_s >= now_s and (there := growing(node, self.history, step)):
                found[node.name] = there
            if number % AT_ONCE == 0:
                yield
        self.growing = found


def sample(terms: NodeTerms, status: GPUNodeStatus | None) -> tuple[Layout, list[int]]:
    """Return the layout of a node, and its values in the order of the layout.

    ``status`` is the report. It is None if the report is stale, and then all values are unknown.
    """
    values: list[int] = []
    slots: dict[str, int] = {}
    requested: dict[tuple[str, int], int] = {}
    for slot, device in enumerate(terms.devices):
        reported = device.device
        slots[reported.uuid] = slot
        reserved_bytes = device.reservation_bytes + device.unconfirmed_bytes
        activity = reported.sm_activity
        values += (
            _units(reserved_bytes),
            _units(reported.used_bytes),
            UNKNOWN if activity is None else _limited(activity.ratio / UNIT_RATIO),
        )
        for holder in device.holders:
            requested[holder.uid, slot] = holder.requested_bytes
    uses: dict[tuple[str, int], tuple[PodOn, int | None]] = {}
    for use in status.pods if status else ():
        if (slot := slots.get(use.device, -1)) < 0:
            continue
        key = use.uid, slot
        used_bytes = use.used_bytes
        if key in uses:
            pod, before = uses[key]
            used_bytes = None if before is None or used_bytes is None else before + used_bytes
        else:
            pod = PodOn(slot, use.uid, use.namespace, use.name, requested.get(key))
        uses[key] = pod, used_bytes
    layout = Layout(tuple(slots), tuple(pod for pod, _ in uses.values()))
    if status is None:
        return layout, [UNKNOWN] * (DEVICE_COLUMNS * len(slots))
    return layout, [*values, *(_units(used) for _, used in uses.values())]


def _units(count_bytes: int | None) -> int:
    if count_bytes is None or count_bytes < 0:
        return UNKNOWN
    return min((count_bytes + UNIT_BYTES // 2) // UNIT_BYTES, UNKNOWN - 1)


def _limited(units: float) -> int:
    return min(max(round(units), 0), UNKNOWN - 1)


def _sums(cluster: Cluster, terms: NodeTerms) -> Sequence[int]:
    allocatable = used = unattributed = headroom = 0
    reserved = sum(unconfirmed_by_model(cluster, terms).values())
    for each in first_of_each_memory(terms.devices):
        allocatable += each.allocatable_bytes
        reserved += each.reservation_bytes
        used += max(0, each.device.used_bytes)
        unattributed += each.unattributed_bytes + each.unreserved_pods_bytes
        headroom += max(0, each.headroom_bytes)
    overcommitted = sum([each.headroom_bytes < 0 for each in terms.devices])
    return allocatable, reserved, used, unattributed, headroom, overcommitted
