"""Decides which pods of a node to evict because of their overuse, from one version of its GPUNode.

``selection`` contains the rule. Pods are evicted only if the setting ``on_overuse`` or their
annotation allows it. A limit (``headroom.gpu/vram-limit``) allows the eviction of a pod that
exceeds it. Static pods are never evicted, because the API server has only a copy of them.
No other field exempts a pod, such as its priority, its scheduler, its owner or its grace period.
With the setting ``overuse_opt_out`` an administrator lets authors exempt their pods.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from headroom.contract.annotations import ON_OVERUSE, OnOveruse, parse_on_overuse
from headroom.contract.errors import BadAnnotation
from headroom.contract.gpunode import ADOPTED, GPUNode, OveruseEviction, Reservation
from headroom.contract.heartbeat import Confirmation
from headroom.contract.kube import Pod
from headroom.contract.quantity import gib
from headroom.core.eviction.eligibility import is_static, leaves_within
from headroom.core.overuse.limits import limits_bytes
from headroom.core.overuse.selection import (
    NONE,
    TOLERANCE_BYTES,
    Balance,
    OveruseEvictions,
    Overusing,
    RunningPod,
    balance,
    overuse_evictions,
)
from headroom.core.overuse.tracker import REJECTED_FOR_S
from headroom.core.placement.device_accounting import first_of_each_memory
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import Unreadable, VramRequest
from headroom.core.placement.snapshot import NodeTerms

#: Maximum grace period in seconds of a pod that is evicted for its overuse. Without a maximum, its
#: author could set a grace period of years, or delete the pod with such a grace period, and the pod
#: would keep the memory of others.
MOST_GRACE_S = 120


class Rejections(Protocol):
    def rejected_lately(
        self, node: str, uid: str, decision: OveruseEviction, now_s: float
    ) -> bool: ...


class Cluster(Protocol):
    """The part of the cluster's state that the decisions read."""

    @property
    def rules(self) -> Rules: ...

    @property
    def overuses(self) -> Rejections: ...

    def gpunode(self, name: str) -> GPUNode | None: ...

    def confirmation(self, name: str) -> Confirmation | None: ...

    def pod(self, uid: str) -> Pod | None: ...

    def pods_on(self, name: str) -> tuple[Pod, ...]: ...

    def terms_of(self, name: str, gpunode: GPUNode | None) -> NodeTerms: ...

    def understand(self, pod: Pod) -> VramRequest | Unreadable: ...


def overuse_evictions_on(cluster: Cluster, gpunode: GPUNode, now_s: float) -> OveruseEvictions:
    """Return the pods to evict from the node. The result is empty if its report is missing or
    stale.

    ``now_s`` is the time of the extender's monotonic clock.
    """
    terms = cluster.terms_of(gpunode.name, gpunode)
    if gpunode.status is None or terms.fresh_until_s < now_s:
        return NONE
    devices = first_of_each_memory(terms.devices)
    pods = _running_pods(cluster, gpunode, terms, now_s)
    return overuse_evictions(devices, pods, cluster.rules.overuse_margin_bytes)


def _running_pods(
    cluster: Cluster, gpunode: GPUNode, node: NodeTerms, now_s: float
) -> dict[str, RunningPod]:
    """Return the pods that are bound to the node and have a reservation there, by uid."""
    reservations = gpunode.spec.reservations
    found: dict[str, RunningPod] = {}
    for pod in cluster.pods_on(gpunode.name):
        uid = pod.metadata.uid
        if (reservation := reservations.get(uid)) is None:
            continue
        decision = reservation.overuse or None
        rejected = decision is not None and cluster.overuses.rejected_lately(
            gpunode.name, uid, decision, now_s
        )
        found[uid] = RunningPod(
            priority=pod.priority,
            evictable=not rejected and not _protected(pod, cluster.rules),
            leaving=leaves_within(pod, MOST_GRACE_S),
            selected_for=decision.device if decision else "",
            granted=ADOPTED not in reservation.flags,
            limits_bytes=limits_bytes(cluster, pod, gpunode, node),
            evictable_above_limit=not rejected
            and not _protected(pod, cluster.rules, is_above_limit=True),
        )
    return found


def _protected(pod: Pod, rules: Rules, is_above_limit: bool = False) -> str:
    """Return why the pod is never evicted for its overuse, or an empty string if it may be
    evicted.

    ``is_above_limit`` states whether the pod exceeds its limit, and not only its reservation.
    """
    if is_static(pod):
        return "it is a static pod"
    text = pod.annotation(ON_OVERUSE)
    try:
        wish = None if text is None else parse_on_overuse(text)
    except BadAnnotation:  # the pod was bound before the annotation was edited
        wish = None
    if rules.evict_overuse or is_above_limit:
        excluded = rules.overuse_opt_out and wish is OnOveruse.REPORT
        return f"it has the annotation {ON_OVERUSE}: report" if excluded else ""
    if wish is OnOveruse.EVICT:
        return ""
    return f"setting on_overuse is report, and it has no annotation {ON_OVERUSE}: evict"


#: State of an overusing pod. ``evicting``: its eviction is decided, and the grace period runs.
#: ``next``: it is selected, but its eviction is not decided yet. ``observed``: it would be evicted
#: if the mode were not observe. ``ending``: it is being deleted. ``other``: another pod of the
#: device is evicted first. ``rejected``: the API server rejected its eviction recently.
#: ``protected``: it may not be evicted. ``none``: the other pods do not lack memory.
Outcome = Literal[
    "evicting", "next", "observed", "ending", "other", "rejected", "protected", "none"
]


@dataclass(frozen=True, slots=True)
class OverusingPod:
    """A pod that uses more than it reserved on a device, and whether it is evicted for this
    reason."""

    namespace: str
    name: str
    uid: str
    device: str
    reserved_bytes: int
    used_bytes: int
    #: Measured free memory of the device, and the memory that must stay free for its other pods.
    free_bytes: int
    needed_bytes: int
    #: The pod's limit on the device, or None if it has no limit.
    limit_bytes: int | None
    outcome: Outcome
    #: When the pod's eviction was decided (RFC 3339). Empty if no eviction was decided.
    decided_at: str
    #: The outcome and its reason, as a clause.
    message: str


def overusing_pods(
    cluster: Cluster, node: NodeTerms, now_s: float, observes: bool
) -> Iterator[OverusingPod]:
    """Yield the pods of the node that use more than they reserved, unless its report is stale.

    ``now_s`` is the time of the monotonic clock. ``observes`` states whether the mode is observe.
    """
    gpunode = cluster.gpunode(node.name)
    devices = list(first_of_each_memory(node.devices))
    measured = any(h.observed and h.measured_bytes for each in devices for h in each.holders)
    if not measured or gpunode is None or gpunode.status is None or node.fresh_until_s < now_s:
        return
    pods = _running_pods(cluster, gpunode, node, now_s)
    margin_bytes = cluster.rules.overuse_margin_bytes
    evictions = overuse_evictions(devices, pods, margin_bytes)
    for each in devices:
        found = balance(each, pods, margin_bytes)
        for holder in each.holders if found else ():
            pod = cluster.pod(holder.uid)
            reservation = gpunode.spec.reservations.get(holder.uid)
            if not found or not pod or not reservation or not holder.observed:
                continue
            used_bytes = holder.measured_bytes or 0
            reserved_bytes = found.reserved_bytes.get(holder.uid, holder.requested_bytes)
            if used_bytes <= reserved_bytes:
                continue
            over = Overusing(
                holder.uid,
                each.device.uuid,
                reserved_bytes,
                used_bytes,
                found.free_bytes,
                found.needed_bytes,
                found.exceeded_limit_bytes(holder),
            )
            outcome, why = _outcome(pod, reservation, over, found, evictions, cluster, now_s)
            if observes and outcome in ("evicting", "next"):
                outcome = "observed"
                why = f"would be evicted if the mode were not observe; {_lacking(over)}"
            yield OverusingPod(
                holder.namespace,
                holder.name,
                holder.uid,
                each.device.uuid,
                reserved_bytes,
                used_bytes,
                found.free_bytes,
                found.needed_bytes,
                found.limits_bytes.get(holder.uid),
                outcome,
                reservation.overuse.since if reservation.overuse else "",
                why,
            )


def _lacking(over: Overusing) -> str:
    """Return why the pod has to be evicted, as a clause."""
    if over.exceeded_limit_bytes is not None:
        used = gib(over.used_bytes, up=True)
        return f"it uses {used}, and its limit is {gib(over.exceeded_limit_bytes)}"
    free, needed = gib(max(0, over.free_bytes)), gib(over.needed_bytes, up=True)
    return f"only {free} of its GPU are free, and the other pods there need {needed}"


def _outcome(
    pod: Pod,
    reservation: Reservation,
    over: Overusing,
    found: Balance,
    evictions: OveruseEvictions,
    cluster: Cluster,
    now_s: float,
) -> tuple[Outcome, str]:
    """Return whether a pod that uses more than it reserved is evicted, and why."""
    decision, lacking = reservation.overuse or None, _lacking(over)
    if leaves_within(pod, MOST_GRACE_S):
        if decision and not decision.rejected_at:
            return "ending", "it was evicted for its overuse, and is terminating"
        return "ending", "it is being deleted"
    is_above_limit = over.exceeded_limit_bytes is not None
    if not found.under_pressure and not is_above_limit:
        if len(found.staying) < 2:
            return "none", "not evicted, because no other pod is on its GPU"
        free, needed = gib(over.free_bytes), gib(over.needed_bytes, up=True)
        return "none", (
            f"not evicted, because {free} of its GPU are free, and the other pods there need "
            f"{needed}"
        )
    if over.excess_bytes <= TOLERANCE_BYTES:
        return "none", (
            f"not evicted, because it uses at most {gib(TOLERANCE_BYTES)} more than it reserved; "
            f"{lacking}"
        )
    if why := _protected(pod, cluster.rules, is_above_limit):
        return "protected", f"not evicted, because {why}; {lacking}"
    if decision and cluster.overuses.rejected_lately(pod.node, over.uid, decision, now_s):
        return "rejected", (
            f"its eviction was rejected at {decision.rejected_at[:19]}Z, for example by a "
            f"PodDisruptionBudget, and is tried again after {REJECTED_FOR_S:.0f} s; {lacking}"
        )
    if over.device in evictions.unresolved:
        return "protected", (
            "not evicted, because a pod of another namespace exceeds its reservation by more but "
            f"may not be evicted; {lacking}"
        )
    selected = evictions.selected.get(over.uid)
    if selected is None or selected.device != over.device:
        return "other", f"not evicted now, because another pod is evicted first; {lacking}"
    if decision:
        return "evicting", f"evicted within seconds; {lacking}"
    return "next", f"evicted next; {lacking}"


def latest_sample(cluster: Cluster, gpunode: GPUNode) -> str:
    """Return the time of the newest sample that confirms this status of the node (RFC 3339).

    The node's clock can be set back. So two timestamps show only whether the samples are equal, not
    which of them is later.
    """
    if gpunode.status is None:
        return ""
    observed_at = gpunode.status.observed_at
    heartbeat = cluster.confirmation(gpunode.name)
    confirms = heartbeat is not None and (
        (heartbeat.gpunode, heartbeat.observed_at) == (gpunode.metadata.uid, observed_at)
    )
    return heartbeat.sampled_at if heartbeat is not None and confirms else observed_at
