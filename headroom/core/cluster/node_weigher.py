"""Weighs nodes, which means to compute their eligibility, and the reserved, unconfirmed and free
memory of each device."""

from collections.abc import Mapping, Set
from dataclasses import replace
from math import inf

import msgspec

from headroom.contract.annotations import DeviceChoice
from headroom.contract.gpunode import (
    CLAIMED,
    UNATTRIBUTED_TOLERANCE_BYTES,
    GPUNode,
    GPUNodeStatus,
    Reservation,
)
from headroom.contract.kube import Node, Pod
from headroom.contract.reasons import Reason
from headroom.core.cluster.adoption import AdoptingNode, Adoption
from headroom.core.cluster.label_inventory import believed
from headroom.core.cluster.node_settings import (
    has_allocatable,
    node_settings,
    obstacle,
    offers_gpus,
)
from headroom.core.cluster.object_cache import NOTHING, ObjectCache
from headroom.core.cluster.trackers.heartbeats import NEVER_S, Heartbeats
from headroom.core.cluster.trackers.sm_activity import Activities
from headroom.core.eviction.back_offs import BackOffs
from headroom.core.placement.device_accounting import DeviceTerms, weigh
from headroom.core.placement.occupancy import occupy
from headroom.core.placement.policy import Rules
from headroom.core.placement.snapshot import NodeTerms

#: A report is ageing in the last third of the time until it becomes stale, because by then a
#: heartbeat is overdue.
AGEING_RATIO = 1 / 3


class NodeWeigher:
    """Computes the terms of nodes from the objects and trackers, and changes none of them.

    Any thread may call its methods.
    """

    def __init__(
        self,
        adoption: Adoption,
        objects: ObjectCache,
        heartbeats: Heartbeats,
        back_offs: BackOffs,
        activities: Activities,
    ) -> None:
        self._adoption = adoption
        self._objects = objects
        self._heartbeats = heartbeats
        self._back_offs = back_offs
        self._activities = activities

    @property
    def rules(self) -> Rules:
        return self._adoption.rules

    def report(self, name: str, gpunode: GPUNode | None) -> GPUNodeStatus | None:
        """Return the devices of the node from its agent's last report, however old it is.

        If no agent has ever reported, return the devices that the node's labels describe if the
        rules accept labels. Otherwise return None.
        """
        return self._report(self._objects.nodes.get(name), gpunode)

    def _report(self, node: Node | None, gpunode: GPUNode | None) -> GPUNodeStatus | None:
        if gpunode is not None and gpunode.status is not None:
            return gpunode.status
        return None if node is None else believed(node, self.rules)

    def adopt(self, pod: Pod, gpunode: GPUNode) -> Reservation | None:
        """Return the reservation to write for an unreserved pod on the node, or None if it needs
        none."""
        return self._adoption.adopt(pod, self._adopting(gpunode))

    def adopted(self, gpunode: GPUNode) -> dict[str, Reservation]:
        """Return the reservations to charge for pods without one in exactly this version of the
        GPUNode."""
        return self._adoption.adopted(gpunode, self._adopting(gpunode))

    def _adopting(self, gpunode: GPUNode) -> AdoptingNode:
        node = self._objects.nodes.get(gpunode.name)
        return self._adoption.on(
            gpunode.name, node, self._report(node, gpunode), node_settings(node)
        )

    def leaving(self, status: GPUNodeStatus, name: str) -> Set[str]:
        """Return the uids of pods in the report that are terminating, have ended or are deleted.

        The kubelet may or may not free their replicas before it admits the next pod.
        """
        staying = {
            pod.metadata.uid
            for pod in self._objects.pods_on(name)
            if not pod.metadata.deletion_timestamp
        }
        return {use.uid for use in status.pods} - staying

    def fresh_until_s(self, name: str) -> float:
        return self._heartbeats.fresh_until_s(name, self._objects.gpunodes.get(name))

    def terms_of(
        self,
        name: str,
        gpunode: GPUNode | None,
        excluded: Set[str] = frozenset(),
        assumed: Mapping[str, Reservation] = NOTHING,
        device_choice: DeviceChoice | None = None,
    ) -> NodeTerms:
        """Return the terms of one node without the reservations of the pods in ``excluded`` (uids).

        ``assumed`` contains the reservations of assumed binds. Only filter passes them, because
        otherwise a bind could fail because of reservations that are never written.

        ``device_choice`` replaces the node's annotation in a simulation.
        """
        node = self._objects.nodes.get(name)
        settings, status = node_settings(node), self._report(node, gpunode)
        if device_choice is not None:
            settings = replace(settings, device_choice=device_choice)
        adopting = self._adoption.on(name, node, status, settings)
        adopted = {} if gpunode is None else self._adoption.adopted(gpunode, adopting)
        by_dra, manager = adopting.by_dra, adopting.manager
        if manager is Reason.DRA_MANAGES:
            if self._has_both(node, gpunode, adopted):
                manager, by_dra = Reason.DRA_AND_PLUGIN, frozenset()
            elif settings.cordoned:  # kube-scheduler could choose the cordoned device
                manager, by_dra = Reason.CORDONED_DEVICE, frozenset()
        reason, detail = obstacle(
            node,
            gpunode,
            status,
            settings,
            manager,
            gpunode is not None and self._back_offs.holds_in(gpunode),
            self.rules,
        )
        if gpunode is None or status is None:
            others = manager is not None or offers_gpus(node, self.rules)
            equipped = gpunode is not None or others
            return NodeTerms(name, reason, NEVER_S, detail=detail, equipped=equipped, by_dra=by_dra)
        reservations: Mapping[str, Reservation] = gpunode.spec.reservations
        unwritten = {**assumed, **adopted}
        if unwritten or not reservations.keys().isdisjoint(excluded):
            reservations = {**unwritten, **reservations}
            reservations = {uid: each for uid, each in reservations.items() if uid not in excluded}
        leaving = self.leaving(status, name) - assumed.keys()
        devices = weigh(
            occupy(status, reservations, leaving),
            status,
            settings.reserve_bytes,
            UNATTRIBUTED_TOLERANCE_BYTES,
            settings.cordoned,
            self.rules.largest_devices,
        )
        devices = self._activities.applied(devices)
        by_agent = status is gpunode.status
        # Labels have no heartbeat, so they never become stale.
        fresh_until_s = self.fresh_until_s(name) if by_agent else inf
        return NodeTerms(
            name,
            reason,
            fresh_until_s,
            devices,
            self._ageing_from_s(fresh_until_s) if by_agent else inf,
            any(source.state == "degraded" for source in status.sources),
            unmeasured="" if by_agent else status.sources[0].message,
            obeys_environment=not status.plugin.ignores_visible_devices,
            gated=settings.device_choice is DeviceChoice.GATED,
            detail=detail,
            by_dra=by_dra,
        )

    def _has_both(
        self, node: Node | None, gpunode: GPUNode | None, adopted: Mapping[str, Reservation]
    ) -> bool:
        """Return whether a device plugin offers a GPU of the node, or a pod with such a GPU still
        runs there.

        In this case kube-scheduler would allocate the same GPU a second time by DRA.
        """
        if gpunode is None or has_allocatable(node, self.rules):
            return has_allocatable(node, self.rules)
        return any(
            CLAIMED not in each.flags and any(charge.candidates for charge in each.charges)
            for each in {**adopted, **gpunode.spec.reservations}.values()
        )

    def refreshed(self, before: NodeTerms, devices: tuple[DeviceTerms, ...]) -> NodeTerms:
        """Return the terms with these devices and the current staleness deadline."""
        fresh_until_s = self.fresh_until_s(before.name)
        return msgspec.structs.replace(
            before,
            devices=devices,
            fresh_until_s=fresh_until_s,
            ageing_from_s=self._ageing_from_s(fresh_until_s),
        )

    def _ageing_from_s(self, fresh_until_s: float) -> float:
        return fresh_until_s - self._heartbeats.stale_after_s * AGEING_RATIO
