"""Taints DRA devices whose processes use memory that no claim accounts for.

kube-scheduler then allocates no more claims on these devices. Running pods continue. Each round
reads what the watches delivered, decides (``dra_taints.taint_decisions``), and creates or deletes
rules.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from headroom.contract.dra import DeviceTaintRule
from headroom.contract.gpunode import GPUNode, GPUNodeStatus
from headroom.contract.keys import RULE_NODE
from headroom.contract.kube import Lease
from headroom.contract.watched import (
    GPUNodeGone,
    GPUNodeSeen,
    HeartbeatGone,
    HeartbeatSeen,
    Relisted,
    WatchEvent,
)
from headroom.core.cluster.claimed_devices import LINGERS_S, DraDevice
from headroom.dra_taints.metrics import TaintTelemetry
from headroom.dra_taints.taint_decisions import TaintDecisions
from headroom.dra_taints.taint_rules import NOT_SERVED, TaintRules
from headroom.runtime.follow.claims import Claims
from headroom.runtime.kube.api_errors import ApiError, ApiStatus
from headroom.runtime.loops import on_thread

log = structlog.get_logger()

#: Maximum seconds between two rounds, and minimum seconds if something changed.
EVERY_S, LEAST_S = 1.0, 0.2
#: Seconds between two calls that list the rules, to find rules that a user has deleted.
LIST_EVERY_S = 60.0


class Reports:
    """The newest reports of nodes, and when their agents last sent data."""

    def __init__(self, claims: Claims, wake: Callable[[], object]) -> None:
        self._claims, self._wake = claims, wake
        self._lock = threading.Lock()
        self._reports: dict[str, GPUNodeStatus] = {}
        self._seen_at_s: dict[str, float] = {}
        self._changed: set[str] = set()

    def apply(self, events: Sequence[WatchEvent]) -> None:
        """Apply the events of watches. Any thread may call this method."""
        changed = self._claims.apply(events)
        with self._lock:
            for event in events:
                changed |= self._take(event)
            self._changed |= changed
        if changed:
            self._wake()

    def take_changed(self) -> set[str]:
        """Return the nodes that changed since the last call."""
        with self._lock:
            changed, self._changed = self._changed, set()
            return changed

    def of(self, node: str) -> GPUNodeStatus | None:
        """Return the newest report of a node."""
        with self._lock:
            return self._reports.get(node)

    def seen_at_s(self, node: str) -> float:
        """Return when the node's agent last sent data, in seconds of the monotonic clock."""
        with self._lock:
            return self._seen_at_s.get(node, -float("inf"))

    def _take(self, event: WatchEvent) -> set[str]:
        match event:
            case GPUNodeSeen(gpunode=gpunode, at_s=at_s):
                return self._see(gpunode, at_s)
            case GPUNodeGone(name=name):
                self._reports.pop(name, None)
                self._seen_at_s.pop(name, None)
                return {name}
            case HeartbeatSeen(lease=lease, at_s=at_s):
                if lease.metadata.name in self._reports:
                    self._seen_at_s[lease.metadata.name] = at_s
            case HeartbeatGone(name=name):
                self._seen_at_s.pop(name, None)
            case Relisted(objects=objects, at_s=at_s) if event.kind is GPUNode:
                nodes = {each.name: each for each in objects if isinstance(each, GPUNode)}
                gone = self._reports.keys() - nodes.keys()
                for name in gone:
                    self._take(GPUNodeGone(name))
                return gone.union(*(self._see(each, at_s) for each in nodes.values()))
            case Relisted(objects=objects, at_s=at_s) if event.kind is Lease:
                for each in objects:
                    if isinstance(each, Lease):
                        self._take(HeartbeatSeen(each, at_s))
        return set()

    def _see(self, gpunode: GPUNode, at_s: float) -> set[str]:
        if gpunode.status is None:
            return set()
        # The GPUNode also changes when an extender writes a reservation.
        if self._reports.get(gpunode.name) == gpunode.status:
            return set()
        self._reports[gpunode.name] = gpunode.status
        self._seen_at_s[gpunode.name] = at_s
        return {gpunode.name}


class DeviceTaintsController:
    """Creates and deletes DeviceTaintRules while it leads."""

    def __init__(
        self,
        reports: Reports,
        claims: Claims,
        rules: TaintRules,
        leads: Callable[[], bool],
        observes: Callable[[], bool],
        stale_after_s: float,
        telemetry: TaintTelemetry,
        now_s: Callable[[], float],
    ) -> None:
        self._reports, self._claims, self._store = reports, claims, rules
        self._leads, self._observes, self._now_s = leads, observes, now_s
        self._stale_after_s, self._telemetry = stale_after_s, telemetry
        self._decisions = TaintDecisions()
        #: The rules by device, or None until they have been listed.
        self._rules: dict[DraDevice, DeviceTaintRule] | None = None
        self._list_at_s = 0.0
        #: By node, its reported devices with their UUIDs, and the excess of each device that is
        #: used beyond its claims.
        self._devices: dict[str, dict[DraDevice, str]] = {}
        self._excess_bytes: dict[str, dict[DraDevice, int]] = {}
        #: The time until which ended claims still count on a node, by node.
        self._again_until_s: dict[str, float] = {}
        #: Why no device can be tainted. Empty if devices can be tainted.
        self.obstacle = ""

    async def round(self) -> None:
        """Decide, and write what has changed. Do nothing without the Lease."""
        self._telemetry.leads.set(self._leads())
        self._weigh()
        if not self._leads():
            self._decisions, self._rules = TaintDecisions(), None
            self._telemetry.rules.set(0)
            return
        if (rules := await self._listed()) is None:
            return
        nodes = {device: node for node, on in self._devices.items() for device in on}
        excess_bytes = {
            device: count for each in self._excess_bytes.values() for device, count in each.items()
        }
        tainted = self._decisions.decide(
            excess_bytes,
            lambda device: device in nodes,
            lambda device: self._is_known(nodes[device], device),
            self._now_s(),
        )
        wanted = set() if self._observes() else tainted
        for device in sorted(rules.keys() - wanted, key=str):
            await self._clear(rules, device)
        for device in sorted(wanted - rules.keys(), key=str):
            node = nodes[device]
            await self._taint(rules, device, node, excess_bytes.get(device, 0))
        self._telemetry.rules.set(len(rules))
        self._telemetry.untainted.set(self._decisions.untainted)

    def _weigh(self) -> None:
        """Compute the excess on nodes that changed or where claims have ended lately."""
        now_s = self._now_s()
        changed = self._reports.take_changed()
        for node in changed:
            self._again_until_s[node] = now_s + LINGERS_S + EVERY_S
        for node in [*self._again_until_s]:
            status = self._reports.of(node)
            offered = self._claims.devices(node)
            if self._again_until_s[node] < now_s:
                del self._again_until_s[node]
            if status is None or not offered:
                self._devices.pop(node, None)
                self._excess_bytes.pop(node, None)
                continue
            self._devices[node] = {
                offered[each.uuid]: each.uuid for each in status.devices if each.uuid in offered
            }
            excess_bytes: dict[DraDevice, int] = {}
            for use in self._claims.uses([(node, status)]):
                if use.excess_bytes:
                    before_bytes = excess_bytes.get(use.device, 0)
                    excess_bytes[use.device] = before_bytes + use.excess_bytes
            self._excess_bytes[node] = excess_bytes

    def _is_known(self, node: str, device: DraDevice) -> bool:
        """Return whether the use of the device is known, because its report is fresh and
        complete."""
        if self._now_s() - self._reports.seen_at_s(node) > self._stale_after_s:
            return False
        status, uuid = self._reports.of(node), self._devices[node][device]
        return status is not None and any(
            each.uuid == uuid and each.unattributed_bytes is not None for each in status.devices
        )

    async def _listed(self) -> dict[DraDevice, DeviceTaintRule] | None:
        """Return the rules, or None if the API server does not serve them."""
        now_s = self._now_s()
        if self._rules is not None and now_s < self._list_at_s:
            return self._rules
        if not self._store.version and not await on_thread(self._store.discover):
            self.obstacle = NOT_SERVED
            return None
        is_first = self._rules is None
        try:
            self._rules = await on_thread(self._store.list)
        except ApiStatus as err:
            if err.status == 404:  # the version is no longer served
                self._store.version = ""
            raise
        self.obstacle = ""
        if is_first:
            self._decisions.adopt(self._rules, now_s)
        self._list_at_s = now_s + LIST_EVERY_S
        return self._rules

    async def _taint(
        self, rules: dict[DraDevice, DeviceTaintRule], device: DraDevice, node: str, excess: int
    ) -> None:
        uuid = self._devices[node][device]
        try:
            rules[device] = await on_thread(partial(self._store.create, device, node, uuid))
        except ApiError as err:
            self._failed(device, err)
            return
        self._telemetry.writes.labels("created").inc()
        log.warning("device_tainted", node=node, device=uuid, excess_bytes=excess)

    async def _clear(self, rules: dict[DraDevice, DeviceTaintRule], device: DraDevice) -> None:
        try:
            await on_thread(partial(self._store.delete, rules[device]))
        except ApiError as err:
            self._failed(device, err)
            return
        rule = rules.pop(device)
        self._telemetry.writes.labels("deleted").inc()
        node = (rule.metadata.annotations or {}).get(RULE_NODE, "")
        log.info("device_taint_cleared", node=node, pool=device.pool, name=device.name)

    def _failed(self, device: DraDevice, err: ApiError) -> None:
        """Log a failed write. The next round decides again from the rules that exist then."""
        self._list_at_s = 0.0
        self._telemetry.writes.labels("failed").inc()
        log.warning("device_taint_not_written", pool=device.pool, name=device.name, error=str(err))
