"""Builds a cluster state from events, and returns the state's decisions about pods."""

from collections.abc import Iterable
from datetime import datetime

from msgspec.structs import replace

from headroom.contract.annotations import OBSERVED_AT
from headroom.contract.gpunode import GPUNode
from headroom.contract.heartbeat import Confirmation, encode_confirmation
from headroom.contract.kube import Lease, Namespace, Node, ObjectMeta, Pod
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, NamespaceSeen, NodeSeen, PodSeen
from headroom.core.cluster.changes import Event
from headroom.core.placement.fit import fit
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import VramRequest
from tests.builders import (
    GATE_IMAGE,
    GIB,
    NOW_S,
    STAMP,
    pod,
    reservation,
)
from tests.recording import RecordingState

STALE_AFTER_S = 90.0
EPOCH_S = datetime.fromisoformat(STAMP).timestamp() - NOW_S


def state_of(*events: Event, rules: Rules | None = None) -> RecordingState:
    state = RecordingState(rules or Rules(gate_image=GATE_IMAGE), STALE_AFTER_S, EPOCH_S)
    state.apply(events)
    return state


def seen(*what: Pod | Node | Namespace | GPUNode, at_s: float = NOW_S) -> Iterable[Event]:
    for o in what:
        match o:
            case Pod():
                yield PodSeen(o)
            case Node():
                yield NodeSeen(o)
            case Namespace():
                yield NamespaceSeen(o)
            case GPUNode():
                yield GPUNodeSeen(o, at_s)


def lease(sampled_at: str, gpunode: str = "gn", observed_at: str = STAMP) -> Lease:
    """Return a heartbeat of node ``n``. By default, it confirms the report of
    ``tests.builders``.
    """
    vouch = Confirmation(sampled_at=sampled_at, gpunode=gpunode, observed_at=observed_at)
    return Lease(
        metadata=ObjectMeta(name="n", annotations={OBSERVED_AT: encode_confirmation(vouch)})
    )


def reason(state: RecordingState, of: str = "8Gi", at_s: float = NOW_S) -> Reason | None:
    snap = state.cluster.snapshot()
    asked = state.cluster.understand(pod(of))
    assert isinstance(asked, VramRequest)
    rows = snap.rows(["n"])
    assert (rows >= 0).all()
    return fit(asked, snap, rows, at_s).reason(0)


def headroom(state: RecordingState) -> list[int]:
    (node,) = state.cluster.snapshot().nodes
    return [terms.headroom_bytes // GIB for terms in node.devices]


def reserving(gpunode: GPUNode, **promised_gib: int | None) -> GPUNode:
    """Return the next version of the GPUNode with these reservations. None removes a
    reservation.
    """
    kept = {uid: p for uid, p in gpunode.spec.reservations.items() if uid not in promised_gib}
    new = {uid: reservation({"A": size * GIB}) for uid, size in promised_gib.items() if size}
    return replace(
        gpunode,
        metadata=replace(gpunode.metadata, resource_version="2"),
        spec=replace(gpunode.spec, reservations={**kept, **new}),
    )


def headroom_of(state: RecordingState, name: str) -> list[int]:
    snap = state.cluster.snapshot()
    return [t.headroom_bytes // GIB for t in snap.nodes[snap.row_of[name]].devices]
