"""Checks that the kept terms of a node equal a new computation after GPUNode versions, heartbeats
and pods in any order, whether or not the node was weighed again.
"""

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headroom.contract.gpunode import EVICTED, GPUNode, GPUNodeSpec, GPUNodeStatus, Source
from headroom.contract.kube import ObjectMeta
from headroom.contract.watched import GPUNodeSeen, HeartbeatSeen, PodGone, PodSeen
from headroom.core.cluster.changes import Event
from headroom.core.placement.snapshot import Columns
from headroom.core.placement.snapshot_builder import build
from tests.builders import GIB, MIB, NOW_S, gpunode, kube_node, pod, reservation, shared, use
from tests.examples import examples
from tests.recording import RecordingState
from tests.state.states import lease, seen, state_of

UIDS = ["a", "b", "stray"]

_used = st.one_of(st.none(), st.sampled_from([0, MIB, GIB, 3 * GIB, 5 * GIB, 9 * GIB]))
_devices = st.builds(
    shared,
    st.sampled_from(["D0", "D1"]),
    used_bytes=st.sampled_from([0, GIB, 5 * GIB, 25 * GIB]),
    unattributed_bytes=st.sampled_from([None, 0, MIB, GIB]),
    healthy=st.sampled_from([True, True, True, False]),
)
_rows = st.builds(use, st.sampled_from(UIDS), st.sampled_from(["D0", "D1"]), _used)
_statuses = st.builds(
    GPUNodeStatus,
    observed_at=st.integers(10, 59).map(lambda s: f"2026-11-21T00:00:{s}Z"),
    devices=st.lists(_devices, min_size=2, max_size=2),
    pods=st.lists(_rows, max_size=3),
    sources=st.sampled_from([[], [Source("proc")], [Source("proc", "degraded")]]),
)
_reservations = st.dictionaries(
    st.sampled_from(["a", "b"]),
    st.builds(
        lambda asked, flags: replace(reservation({"D0": asked, "D1": asked}), flags=flags),
        st.sampled_from([4 * GIB, 8 * GIB, 20 * GIB]),
        st.sampled_from([[], [], [], [EVICTED]]),
    ),
)


def _measured(data: st.DataObject, was: GPUNode) -> GPUNode:
    """Return the next version, in which some measurements differ."""
    status = was.status
    assert status is not None
    devices = [
        replace(d, used_bytes=data.draw(st.sampled_from([GIB, 5 * GIB]))) for d in status.devices
    ]
    rows = [replace(row, used_bytes=data.draw(_used)) for row in status.pods]
    return replace(was, status=replace(status, devices=devices, pods=rows))


def _next(data: st.DataObject, was: GPUNode) -> Event:
    at_s = NOW_S + data.draw(st.integers(0, 100))
    match data.draw(
        st.sampled_from(["measured"] * 4 + ["report", "ledger", "lease", "pod", "gone"])
    ):
        case "measured":
            return GPUNodeSeen(_measured(data, was), at_s)
        case "report":
            return GPUNodeSeen(replace(was, status=data.draw(_statuses)), at_s)
        case "ledger":
            spec = GPUNodeSpec(initialised=True, reservations=data.draw(_reservations))
            return GPUNodeSeen(replace(was, spec=spec), at_s)
        case "lease":
            stamp = was.status.observed_at if was.status else ""
            return HeartbeatSeen(
                lease(f"2026-11-21T00:01:{data.draw(st.integers(10, 59))}Z", observed_at=stamp),
                at_s,
            )
        case "pod":
            return PodSeen(pod("4Gi", uid=data.draw(st.sampled_from(UIDS)), node="n"))
        case _:
            return PodGone(data.draw(st.sampled_from(UIDS)))


def _columns(columns: Columns) -> dict[str, Any]:
    return {name: getattr(columns, name).tolist() for name in Columns.__slots__}


@settings(max_examples=examples(500), deadline=None)
@given(st.data())
def test_the_kept_terms_of_a_node_equal_computed_terms(data: st.DataObject) -> None:
    held = gpunode(shared("D0"), shared("D1"), pods=[use("a", "D0", GIB)])
    state = state_of(*seen(kube_node(), held))
    for version in range(2, data.draw(st.integers(3, 15))):
        event = _next(data, held)
        if isinstance(event, GPUNodeSeen):
            metadata = ObjectMeta(name="n", uid=held.metadata.uid, resource_version=str(version))
            held = replace(event.gpunode, metadata=metadata)
            event = GPUNodeSeen(held, event.at_s)
        if data.draw(st.booleans()):
            state.apply([event])  # Weighs only the nodes that it changed.
        else:
            take(state, event)
        if data.draw(st.booleans()):
            while state.weigh_next():
                pass
            _equals_a_new_computation(state, held)


def take(state: RecordingState, *events: Event) -> None:
    """Apply events like the events of a watch, whose nodes are weighed later."""
    for _ in state.steps(events):
        pass


def _equals_a_new_computation(state: RecordingState, held: GPUNode) -> None:
    kept, computed = state.cluster.snapshot(), build([state.cluster.terms_of("n", held)])
    assert kept.nodes == computed.nodes
    assert _columns(kept.columns) == _columns(computed.columns)
    for name in ("fresh_until_s", "ageing_from_s", "degraded", "spare_bytes", "node_reason"):
        assert getattr(kept, name).tolist() == getattr(computed, name).tolist(), name
    over = {each.device: each for each in state.cluster.overcommits.now()}
    for terms in kept.nodes[0].devices:
        beyond = over.get(terms.device.uuid)
        assert (beyond is not None) == (terms.headroom_bytes < 0 and terms.believed)
        assert beyond is None or beyond.holders == terms.holders


PROMISES = {"a": reservation({"D0": 8 * GIB})}


def shown(used_bytes: int, version: int, unattributed_bytes: int = 0, **rest: Any) -> GPUNode:
    """Return a node whose pod has a reservation of 8 GiB on D0 and uses this much of it."""
    first = shared(
        "D0", used_bytes=used_bytes + unattributed_bytes, unattributed_bytes=unattributed_bytes
    )
    rest = {"reservations": PROMISES, **rest}
    return gpunode(first, pods=[use("a", "D0", used_bytes)], version=str(version), **rest)


def test_replaced_reports_are_not_kept() -> None:
    """Two copies for each of 5,000 nodes would not fit into memory."""
    first = shown(GIB, 1)
    before = sys.getrefcount(first.status)
    state = state_of(*seen(kube_node(), first))
    kept = sys.getrefcount(first.status)
    state.apply([GPUNodeSeen(replace(shown(2 * GIB, 2), spec=first.spec), NOW_S)])
    after = sys.getrefcount(first.status)
    assert kept > before
    assert after == before


def test_pods_on_an_overcommitted_device_are_reported_with_their_use() -> None:
    """An unconfirmed pod shares a device with another pod and an unattributed process."""
    held = {**PROMISES, "b": reservation({"D0": 8 * GIB})}
    state = state_of(*seen(kube_node(), shown(GIB, 1, 12 * GIB, reservations=held)))
    for version, used_bytes in ((2, GIB), (3, 3 * GIB)):
        state.apply([GPUNodeSeen(shown(used_bytes, version, 12 * GIB, reservations=held), NOW_S)])
        (over,) = state.cluster.overcommits.now()
        assert [holder.measured_bytes for holder in over.holders] == [used_bytes, None]


def test_a_node_with_a_pod_to_evict_is_checked_with_each_report() -> None:
    leaving = {"a": replace(PROMISES["a"], flags=[EVICTED])}
    sits = pod("8Gi", uid="a", node="n")
    state = state_of(*seen(kube_node(), sits, shown(GIB, 1, reservations=leaving)))
    assert state.take_unsettled() == ["n"]
    state.apply([GPUNodeSeen(shown(2 * GIB, 2, reservations=leaving), NOW_S)])
    assert state.take_unsettled() == ["n"]


@pytest.mark.parametrize("gone", [False, True])
def test_an_orphaned_reservation_is_checked_when_its_agent_reports(gone: bool) -> None:
    sits = pod("8Gi", uid="a", node="n")
    state = state_of(*seen(kube_node(), sits, shown(GIB, 1)))
    if gone:
        state.apply([PodGone("a")])
    state.take_unsettled()
    heartbeat = lease("2026-11-21T00:00:30Z")
    state.apply([HeartbeatSeen(heartbeat, NOW_S + 30)])
    assert state.take_unsettled() == (["n"] if gone else [])


def test_a_heartbeat_after_a_stale_report_counts_as_a_gain() -> None:
    state = state_of(*seen(kube_node(), shown(GIB, 1)))
    state.apply([HeartbeatSeen(lease("2026-11-21T00:00:30Z"), NOW_S + 30)])
    before = state.cluster.snapshot().generation
    state.apply([HeartbeatSeen(lease("2026-11-21T00:01:00Z"), NOW_S + 60)])
    assert state.cluster.headroom_gains.of("n") <= before
    state.apply([HeartbeatSeen(lease("2026-11-21T00:10:00Z"), NOW_S + 600)])
    assert state.cluster.headroom_gains.of("n") > before


def test_a_prediction_is_compared_with_any_report_that_shows_the_pod() -> None:
    state = state_of(*seen(kube_node(), pod("8Gi", uid="a", node="n")))
    empty = gpunode(shared("D0"), version="1")
    state.apply([GPUNodeSeen(empty, NOW_S)])
    reserved = gpunode(shared("D0"), version="2", reservations=PROMISES)
    state.apply([GPUNodeSeen(reserved, NOW_S)])
    assert state.cluster.observations.is_pending("n", "a")
    state.apply([GPUNodeSeen(replace(shown(GIB, 3), spec=reserved.spec), NOW_S)])
    assert not state.cluster.observations.is_pending("n", "a")
    assert [outcome.uid for outcome in state.take_outcomes()] == ["a"]
