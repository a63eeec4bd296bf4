"""Records the history of devices and pods from the reports that the watches deliver.

It reads the state of the cluster in memory and sends nothing to the API server. Every
``RESOLUTION_S`` it compares the nodes with those of its last round, a few at a time, and adds a row
for each node that changed.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from contract.gpunode import GPUNode, GPUNodeStatus
from extender.periodic import Loops
from extender.placement.device_accounting import DeviceTerms
from extender.placement.snapshot import NodeTerms
from extender.state.cluster_state import ClusterState
from extender.state.gpu_pods import unconfirmed_by_model
from extender.state.growth import Growing, growing
from extender.state.history import (
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
from extender.state.holdings import Held, Holdings, add, limited, of_node
from extender.state.overuse import first_of_each_memory

#: Nodes that are compared before the event loop serves other tasks.
AT_ONCE = 50
#: Rounds between two searches for growing devices and for old rows: half a minute.
CHORES_EVERY = 3
#: Sums of one node: the fields of ``Totals`` from ``allocatable_bytes`` to
#: ``overcommitted_devices``.
Sums = tuple[int, int, int, int, int, int]


class _HeldOnNode(NamedTuple):
    gpunode: GPUNode
    devices: Sequence[DeviceTerms]
    fresh: bool
    held: Held


class HistoryRecorder:
    """Adds rows to ``history``. ``pending`` returns the number of pending pods."""

    def __init__(
        self, cluster: ClusterState, history: History, wall_s: Callable[[], float]
    ) -> None:
        self._cluster = cluster
        self._wall_s = wall_s
        self.history = history
        #: Devices whose use grows, by node; replaced as a whole.
        self.growing: Mapping[str, tuple[Growing, ...]] = {}
        #: Node -> its terms and its GPUNode when it changed last, whether its report was fresh, and
        #: its sums.
        self._seen: dict[str, tuple[NodeTerms, GPUNode | None, bool, Sums]] = {}
        #: Node -> what the namespaces hold there, and the inputs of that.
        self._held: dict[str, _HeldOnNode] = {}
        #: The sums over all nodes; replaced as a whole.
        self.held: Held = {}
        self._rounds = 0

    def start(self, loops: Loops, begun: asyncio.Event) -> None:
        """Start the loop. It records nothing before ``begun`` is set."""

        async def record() -> None:
            if begun.is_set():
                for _ in self.record(asyncio.get_running_loop().time()):
                    await asyncio.sleep(0)

        loops.start("history", record, RESOLUTION_S)

    def record(self, now_s: float) -> Iterator[None]:
        """Record what changed since the last round; other tasks may run between two steps.

        ``now_s``: the monotonic clock.
        """
        step = int(self._wall_s() // RESOLUTION_S)
        snap = self._cluster.snapshot()
        for number, terms in enumerate(snap.nodes, 1):
            fresh = terms.fresh_until_s >= now_s
            known, gpunode = self._seen.get(terms.name), self._cluster.gpunode(terms.name)
            # A heartbeat replaces the terms of the node, but not those of its devices.
            if (
                known is None
                or known[0].devices is not terms.devices
                or known[1] is not gpunode
                or known[2] != fresh
            ):
                self._seen[terms.name] = terms, gpunode, fresh, _sums(self._cluster, terms)
                status = gpunode.status if gpunode else None
                self.history.add(terms.name, step, *sample(terms, status if fresh else None))
                self._hold(terms, gpunode, fresh)
            if number % AT_ONCE == 0:
                yield
        if len(self._seen) > len(snap.nodes):
            for name in [name for name in self._seen if name not in snap.row_of]:
                del self._seen[name]
                self._held.pop(name, None)
                self.history.add(name, step, Layout(), ())
        if self._seen:
            each_node = np.array([each[3] for each in self._seen.values()], np.int64)
            sums: list[int] = each_node.sum(axis=0).tolist()
            allocatable, reserved, used, unattributed, headroom, overcommitted = sums
            pending = len(self._cluster.unbound())
            self.history.add_totals(
                Totals(
                    step,
                    allocatable,
                    reserved,
                    used,
                    unattributed,
                    headroom,
                    overcommitted,
                    pending,
                )
            )
        yield
        held: dict[str, Holdings] = {}
        for number, each in enumerate(list(self._held.values()), 1):
            add(held, each.held)
            if number % AT_ONCE == 0:
                yield
        self.held = limited(held)
        self.history.held.add(self.held, self._wall_s(), now_s)
        yield
        self._rounds += 1
        if self._rounds % CHORES_EVERY == 0:
            self.history.forget(step)
            yield
            yield from self._find_growing(step)

    def _hold(self, terms: NodeTerms, gpunode: GPUNode | None, fresh: bool) -> None:
        """Note what the namespaces hold on a node. A mere heartbeat does not change it."""
        if gpunode is None:
            self._held.pop(terms.name, None)
            return
        known = self._held.get(terms.name)
        if (
            known is None
            or known.gpunode is not gpunode
            or known.devices is not terms.devices
            or known.fresh != fresh
        ):
            held = of_node(self._cluster, gpunode, terms.devices, fresh, self._wall_s())
            self._held[terms.name] = _HeldOnNode(gpunode, terms.devices, fresh, held)

    def _find_growing(self, step: int) -> Iterator[None]:
        found: dict[str, tuple[Growing, ...]] = {}
        for number, (name, (terms, _, fresh, _)) in enumerate(list(self._seen.items()), 1):
            if fresh and (there := growing(terms, self.history, step)):
                found[name] = there
            if number % AT_ONCE == 0:
                yield
        self.growing = found


def sample(terms: NodeTerms, status: GPUNodeStatus | None) -> tuple[Layout, list[int]]:
    """Return the layout of a node, and its values in the order of the layout.

    ``status``: the report; None if it is stale, so that no value is known.
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
    return _limited(count_bytes / UNIT_BYTES)


def _limited(units: float) -> int:
    return min(max(round(units), 0), UNKNOWN - 1)


def _sums(cluster: ClusterState, terms: NodeTerms) -> Sums:
    unconfirmed = unconfirmed_by_model(cluster, terms)
    memories = list(first_of_each_memory(terms.devices))
    return (
        sum(each.allocatable_bytes for each in memories),
        sum(each.reservation_bytes for each in memories) + sum(unconfirmed.values()),
        sum(max(0, each.device.used_bytes) for each in memories),
        sum(each.unattributed_bytes + each.unreserved_pods_bytes for each in memories),
        sum(max(0, each.headroom_bytes) for each in memories),
        sum(each.headroom_bytes < 0 for each in terms.devices),
    )
