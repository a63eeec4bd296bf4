"""Checks that the state keeps no data of deleted nodes and pods, even if many nodes and pods are
created and deleted.
"""

import gc
from types import FunctionType, ModuleType

import pytest

from headroom.contract.gpunode import Charge, Reservation
from headroom.contract.kube import ObjectMeta, ResourceSlice, ResourceSliceSpec, SliceDevice
from headroom.contract.watched import (
    ClaimGone,
    ClassGone,
    GPUNodeGone,
    GPUNodeSeen,
    HeartbeatGone,
    HeartbeatSeen,
    NodeGone,
    PodGone,
    PodSeen,
    SliceGone,
    SliceSeen,
)
from headroom.core.cluster.changes import BindBegun, BindEnded
from headroom.core.cluster.trackers import prediction_tracker
from tests.builders import GIB, GPU, NOW_S, STAMP, gpunode, kube_node, pod, reservation, shared, use
from tests.recording import RecordingState
from tests.state.dra import claim, class_of
from tests.state.states import lease, seen, state_of

#: Objects behind these do not belong to the state.
_SHARED = (type, FunctionType, ModuleType)


def names_in(state: RecordingState) -> set[str]:
    """Return every text that is reachable from the state, except for the limited list of deleted
    pods."""
    found: set[str] = set()
    known = {id(state.cluster.departures), id(type(state))}
    left: list[object] = [state]
    while left:
        held = left.pop()
        keys = list(held) if isinstance(held, dict) else []  # A dict does not refer to them.
        for each in [*keys, *gc.get_referents(held)]:
            if id(each) not in known and not isinstance(each, _SHARED):
                known.add(id(each))
                left.append(each)
                if isinstance(each, str):
                    found.add(each)
    return found


def test_all_data_of_a_deleted_node_is_dropped() -> None:
    state = state_of()
    node = "former-node"
    sits, waits = pod(uid="former-sits", name="q", node=node), pod(uid="former-waits")
    given = gpunode(
        shared("former-device"),
        name=node,
        reservations={"former-sits": reservation({"former-device": GIB})},
        pods=[use("former-sits", "former-device")],
    )
    beat = lease(STAMP)
    beat = type(beat)(metadata=ObjectMeta(name=node, annotations=beat.metadata.annotations))
    spec = ResourceSliceSpec(driver="gpu.nvidia.com", node_name=node, devices=[SliceDevice()])
    piece = ResourceSlice(metadata=ObjectMeta(name="former-slice"), spec=spec)
    state.apply([*seen(kube_node(node), given, sits, waits), HeartbeatSeen(beat, NOW_S)])
    state.apply([BindBegun(waits, node), SliceSeen(piece), class_of(None, "former-class")])
    state.apply([claim("former-sits", name="former-claim")])
    assert {name for name in names_in(state) if name.startswith("former-")} >= {
        node,
        "former-slice",
        "former-class",
        "former-claim",
    }
    state.apply(
        [BindEnded("former-waits", node), PodGone("former-waits"), SliceGone("former-slice")]
    )
    state.apply([ClassGone("former-class"), ClaimGone("default", "former-claim")])
    state.apply([PodGone("former-sits"), HeartbeatGone(node), GPUNodeGone(node), NodeGone(node)])
    state.take_unsettled()
    state.take_outcomes()
    state.cluster.snapshot()
    assert {name for name in names_in(state) if name.startswith("former-")} == set()


#: Many more pods than the number that a node's predictions are compared with.
MANY = 75


def names_after_short_pods(idle: Reservation, shown_on: str | None) -> int:
    """Create and delete short pods on a node next to a pod that no report ever shows. Return how
    many names of them are still held. Reports show each short pod on ``shown_on``.
    """
    state = state_of()
    state.apply(seen(kube_node("n"), gpunode(name="n")))
    for i in range(MANY):
        uid = f"former-{i}"
        own = {"idle": idle, uid: reservation({"b": GIB}, name=uid)}
        state.apply([PodSeen(pod(uid=uid, name=uid, node="n"))])
        rows = [use(uid, shown_on, GIB, replica=f"{shown_on}::0")] if shown_on else []
        devices = [shared("a", free=4), shared("b", free=3, allocated=1)]
        for step, (reservations, shown) in enumerate(
            ((own, []), (own, rows), ({"idle": idle}, []))
        ):
            version = str(10 + 3 * i + step)
            known = gpunode(
                *devices, name="n", version=version, reservations=reservations, pods=shown
            )
            state.apply([GPUNodeSeen(known, NOW_S)])
        state.apply([PodGone(uid, ended=True)])
        state.take_outcomes()
    state.take_unsettled()
    state.cluster.snapshot()
    return sum(name.startswith("former-") for name in names_in(state))


def test_a_pod_whose_variable_decides_keeps_no_baseline_for_later_pods() -> None:
    """An idle notebook that follows its own NVIDIA_VISIBLE_DEVICES uses no memory for days."""
    charge = Charge(resource=GPU, count=1, candidates={"a": GIB}, by_environment=True)
    idle = Reservation(namespace="default", name="idle", charges=[charge], attempt="1")
    assert names_after_short_pods(idle, "b") < 10


@pytest.mark.parametrize("shown_on", ["b", None])
def test_a_pod_that_no_report_shows_keeps_little_data_of_later_pods(
    monkeypatch: pytest.MonkeyPatch, shown_on: str | None
) -> None:
    monkeypatch.setattr(prediction_tracker, "MAX_NODE_ENTRIES", 50)
    assert names_after_short_pods(reservation({"a": GIB}, name="idle"), shown_on) <= 50
