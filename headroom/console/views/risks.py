"""Finds devices at risk: overcommitted, soon full, unhealthy, or used above the requests."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from headroom.console.history.growth import Growing
from headroom.console.view import View
from headroom.console.view_context import Context
from headroom.contract.quantity import gib
from headroom.core.overuse.tracker import Overcommit, Overuse
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.snapshot import NodeTerms, Snapshot

#: Maximum number of pods named in one entry.
MOST_PODS = 5


class Risk(IntEnum):
    """Urgency of a risk. If a device has several risks, the highest counts."""

    NONE = 0
    #: A pod uses more than it requested.
    OVERUSE = 1
    #: An unhealthy device still has pods.
    UNHEALTHY = 2
    #: At its current rate of growth, the device will soon be full.
    GROWING = 3
    OVERCOMMITTED = 4


class PodName(View):
    namespace: str
    name: str


class RiskView(View):
    """A device at risk, with its most urgent risk."""

    kind: str
    """overcommitted, growing, unhealthy or overuse."""
    node: str
    device: str
    gpu: str
    """Name of the device, as in the list of nodes."""
    model: str
    message: str
    """The risk as a sentence, with numbers."""
    excess_bytes: int | None = None
    """Excess in bytes, for kinds overcommitted and overuse."""
    full_in_s: float | None = None
    """Seconds until the device is full, for kind growing."""
    pods: list[PodName]
    """Pods that cause the risk or are endangered by it, largest first."""


def risks(context: Context, snap: Snapshot, limit: int) -> tuple[list[RiskView], int]:
    """Return the devices at risk, most urgent first, and the total number of devices at risk.

    Only the returned devices get a view, because every device can be at risk.
    """
    # Another thread replaces both at any time, so read each of them only once.
    growing, lasting = context.growing(), context.cluster.overuses.lasting
    overuses = _overuse_by_device(lasting)
    overcommits = {each.key: each for each in context.cluster.overcommits.now()}
    found = [
        _Found(
            node,
            terms,
            risk,
            growing.get(node.name, ()),
            overuses.get(terms.device.uuid, ()),
            overcommits.get((node.name, terms.device.uuid)),
        )
        for node, terms, risk in _at_risk(snap, growing, lasting)
    ]
    return [each.view() for each in heapq.nsmallest(limit, found, key=_Found.key)], len(found)


def risk_of(context: Context, node: NodeTerms, terms: DeviceTerms) -> RiskView | None:
    """Return the most urgent risk of one device, or None if it has no risk."""
    uuid, growing = terms.device.uuid, context.growing().get(node.name, ())
    overused = _overuse_by_device(context.cluster.overuses.lasting).get(uuid, ())
    level = _level(terms, any(each.device == uuid for each in growing), bool(overused))
    if not level:
        return None
    key = node.name, uuid
    over = next((each for each in context.cluster.overcommits.now() if each.key == key), None)
    return _Found(node, terms, level, growing, overused, over).view()


def risk_levels(context: Context, snap: Snapshot) -> Mapping[str, Risk]:
    """Return the risk of each device at risk, by UUID."""
    found = _at_risk(snap, context.growing(), context.cluster.overuses.lasting)
    return {terms.device.uuid: risk for _, terms, risk in found}


def _at_risk(
    snap: Snapshot, growing: Mapping[str, Sequence[Growing]], lasting: Sequence[Overuse]
) -> Iterator[tuple[NodeTerms, DeviceTerms, Risk]]:
    """Yield the devices at risk. Columns select them first, because most devices are not at
    risk."""
    columns = snap.columns
    suspects = (columns.headroom_bytes < 0) | (columns.health_issue > 0)
    rows, slots = np.nonzero(suspects & (columns.replicas >= 0))
    found = set(zip(rows.tolist(), slots.tolist(), strict=True))
    grows = {each.device for there in growing.values() for each in there}
    overused = {each.device for each in lasting}
    nodes = {*growing, *(each.node for each in lasting)}
    for name in nodes & snap.row_of.keys():
        row = snap.row_of[name]
        for slot, terms in enumerate(snap.nodes[row].devices):
            if terms.device.uuid in grows or terms.device.uuid in overused:
                found.add((row, slot))
    for row, slot in found:
        node = snap.nodes[row]
        terms = node.devices[slot]
        uuid = terms.device.uuid
        if risk := _level(terms, uuid in grows, uuid in overused):
            yield node, terms, risk


def _overuse_by_device(lasting: Sequence[Overuse]) -> Mapping[str, list[Overuse]]:
    """Return the overuse on each device, largest first."""
    found: dict[str, list[Overuse]] = {}
    for each in sorted(lasting, key=lambda each: -each.excess_bytes):
        found.setdefault(each.device, []).append(each)
    return found


def _level(terms: DeviceTerms, growing: bool, overused: bool) -> Risk:
    """Return the most urgent risk of a device."""
    if terms.headroom_bytes < 0 and terms.believed:
        return Risk.OVERCOMMITTED
    if growing:
        return Risk.GROWING
    if terms.unhealthy is not None and terms.holders:
        return Risk.UNHEALTHY
    return Risk.OVERUSE if overused else Risk.NONE


@dataclass(frozen=True, slots=True)
class _Found:
    """A device at risk. ``overused`` is the overuse on it, largest first."""

    node: NodeTerms
    terms: DeviceTerms
    risk: Risk
    growing: Sequence[Growing]
    overused: Sequence[Overuse]
    over: Overcommit | None

    def key(self) -> tuple[float | str, ...]:
        """Return a key that sorts the most urgent first."""
        if self.risk is Risk.OVERCOMMITTED:
            urgency = float(self.terms.headroom_bytes)
        elif self.risk is Risk.GROWING:
            urgency = self._grows.full_in_s
        elif self.risk is Risk.UNHEALTHY:
            urgency = -float(len(self.terms.holders))
        else:
            urgency = -float(self._overuse_bytes)
        return -self.risk, urgency, self.node.name, self.terms.device.index

    def view(self) -> RiskView:
        terms, device = self.terms, self.terms.device
        holders = sorted(terms.holders, key=lambda each: -each.charged_bytes)
        view = RiskView(
            kind=self.risk.name.lower(),
            node=self.node.name,
            device=device.uuid,
            gpu=device.name,
            model=device.model,
            message="",
            pods=[
                PodName(namespace=each.namespace, name=each.name) for each in holders[:MOST_PODS]
            ],
        )
        if self.risk is Risk.OVERCOMMITTED:
            view.excess_bytes = -terms.headroom_bytes
            view.message = (
                f"{gib(terms.committed_bytes)} are reserved or used of "
                f"{gib(terms.allocatable_bytes)}: {gib(-terms.headroom_bytes)} too much"
            )
            if self.over is not None and self.over.takers:
                view.message += f"; {_taken_text(self.over)}"
                view.pods = _with_takers(self.over, view.pods)
            if terms.unattributed_bytes:
                size = gib(terms.unattributed_bytes, up=True)
                view.message += f"; processes of no known pod use {size}"
        elif self.risk is Risk.GROWING:
            grows = self._grows
            view.full_in_s = round(grows.full_in_s, 1)
            an_hour = gib(round(3600 * grows.bytes_per_s))
            view.message = f"grows by {an_hour} an hour: full in {_minutes(grows.full_in_s)}"
            if grows.name:
                view.pods = [PodName(namespace=grows.namespace, name=grows.name)]
        elif self.risk is Risk.UNHEALTHY:
            view.message = (
                f"unhealthy: {terms.health_detail or 'see the device'}; its pods may fail"
            )
        else:
            view.excess_bytes = self._overuse_bytes
            view.pods = [
                PodName(namespace=each.namespace, name=each.name)
                for each in self.overused[:MOST_PODS]
            ]
            view.message = _overuse_text(self.overused[0])
        return view

    @property
    def _grows(self) -> Growing:
        return next(each for each in self.growing if each.device == self.terms.device.uuid)

    @property
    def _overuse_bytes(self) -> int:
        return sum(each.excess_bytes for each in self.overused)


def _overuse_text(each: Overuse) -> str:
    return (
        f"{each.namespace}/{each.name} uses {gib(each.measured_bytes)} and requested "
        f"{gib(each.requested_bytes)}"
    )


def _taken_text(over: Overcommit) -> str:
    """Describe the pod that uses the most memory that it did not reserve."""
    largest = over.takers[0]
    who = f"{largest.namespace}/{largest.name}" if largest.name else f"pod {largest.uid}"
    uses = f"{who} uses {gib(largest.measured_bytes or 0)}"
    if largest in over.unreserved:
        return f"{uses} without a reservation"
    return f"{uses} and requested {gib(largest.requested_bytes)}"


def _with_takers(over: Overcommit, pods: list[PodName]) -> list[PodName]:
    """Return the pods without a reservation, then the other pods."""
    named = [each for each in over.unreserved if each.name]
    unreserved = [PodName(namespace=each.namespace, name=each.name) for each in named]
    return [*unreserved, *pods][:MOST_PODS]


def _minutes(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return "less than a minute"
    return "1 minute" if minutes == 1 else f"{minutes} minutes"
