"""Decides which pods of a node to evict because of their overuse, from one version of its GPUNode.

``placement.overuse_eviction`` has the rule. Pods are evicted only if the setting ``on_overuse`` or
their annotation allows it. Never evicted are static pods, pods of critical priority, and pods that
were bound without a reservation.
"""

from datetime import datetime

from contract.annotations import ON_OVERUSE, OnOveruse, parse_on_overuse
from contract.errors import BadAnnotation
from contract.gpunode import ADOPTED, GPUNode, Reservation
from contract.kube import Pod
from extender.placement.overuse_eviction import (
    NONE,
    OveruseEvictions,
    RunningPod,
    overuse_evictions,
)
from extender.placement.policy import Rules
from extender.state.cluster_state import ClusterState
from extender.state.evictable_pods import CRITICAL, MIRRORED
from extender.state.heartbeats import age
from extender.state.nominations import priority
from extender.state.overuse import first_of_each_memory

#: Seconds for which a pod is left out after its eviction was rejected.
REJECTED_FOR_S = 30.0


def overuse_evictions_on(cluster: ClusterState, gpunode: GPUNode, now_s: float) -> OveruseEvictions:
    """Return the pods to evict from the node; none if its report is missing or stale.

    ``now_s``: the extender's monotonic clock.
    """
    terms = cluster.terms_of(gpunode.name, gpunode)
    if gpunode.status is None or terms.fresh_until_s < now_s:
        return NONE
    pods: dict[str, RunningPod] = {}
    for pod in cluster.pods_on(gpunode.name):
        uid = pod.metadata.uid
        reservation = gpunode.spec.reservations.get(uid)
        if reservation is not None:
            pods[uid] = RunningPod(
                priority=priority(pod),
                evictable=not rejected_lately(reservation, cluster.epoch_s + now_s)
                and ADOPTED not in reservation.flags
                and may_be_evicted(pod, cluster.rules),
                leaving=bool(pod.metadata.deletion_timestamp),
                selected_for=reservation.overuse.device if reservation.overuse else "",
            )
    devices = first_of_each_memory(terms.devices)
    return overuse_evictions(devices, pods, cluster.rules.overuse_margin_bytes)


def rejected_lately(reservation: Reservation, wall_s: float) -> bool:
    """Return whether the eviction of the pod was rejected in the last ``REJECTED_FOR_S``.

    ``wall_s``: Unix seconds. The ledger has the time, so that all replicas leave out the pod.
    """
    since_s = age(reservation.overuse.rejected_at, wall_s) if reservation.overuse else None
    return since_s is not None and abs(since_s) < REJECTED_FOR_S


def may_be_evicted(pod: Pod, rules: Rules) -> bool:
    """Return whether settings and annotation allow to evict the pod because of its overuse."""
    if priority(pod) >= CRITICAL or pod.annotation(MIRRORED) is not None:
        return False
    text = pod.annotation(ON_OVERUSE)
    try:
        wish = None if text is None else parse_on_overuse(text)
    except BadAnnotation:  # the pod was bound before the annotation was edited
        wish = None
    if rules.evict_overuse:
        return not (rules.overuse_opt_out and wish is OnOveruse.REPORT)
    return wish is OnOveruse.EVICT


def latest_sample(cluster: ClusterState, gpunode: GPUNode) -> str:
    """Return when the newest sample was taken that confirms this status of the node (RFC 3339)."""
    if gpunode.status is None:
        return ""
    observed_at = gpunode.status.observed_at
    heartbeat = cluster.confirmation(gpunode.name)
    confirms = heartbeat is not None and (
        (heartbeat.gpunode, heartbeat.observed_at) == (gpunode.metadata.uid, observed_at)
    )
    return heartbeat.sampled_at if heartbeat is not None and confirms else observed_at


def is_later(stamp: str, than: str) -> bool:
    """Return whether an RFC 3339 timestamp is later than another; False if one is not valid."""
    try:
        return datetime.fromisoformat(stamp) > datetime.fromisoformat(than)
    except (ValueError, TypeError):  # not both have a time zone
        return False
