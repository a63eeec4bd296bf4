"""Of nodes that are gone nothing is kept, however many come and go."""

import gc
from types import FunctionType, ModuleType

from contract.kube import ObjectMeta, ResourceSlice, ResourceSliceSpec
from extender.cluster.events import (
    BindBegun,
    BindEnded,
    GPUNodeGone,
    HeartbeatGone,
    HeartbeatSeen,
    NodeGone,
    PodGone,
    SliceGone,
    SliceSeen,
)
from extender.cluster.state import ClusterState
from tests.builders import GIB, NOW_S, STAMP, gpunode, kube_node, pod, promise, shared, use
from tests.cluster.test_state import lease, seen, state_of

#: What lies behind these is not the state's.
_SHARED = (type, FunctionType, ModuleType)


def names_in(state: ClusterState) -> set[str]:
    """Every text that can be reached from it, but for the bounded memory of pods that went."""
    found: set[str] = set()
    known = {id(state.departures), id(type(state))}
    left: list[object] = [state]
    while left:
        held = left.pop()
        keys = list(held) if isinstance(held, dict) else []  # a dict does not tell those
        for each in [*keys, *gc.get_referents(held)]:
            if id(each) not in known and not isinstance(each, _SHARED):
                known.add(id(each))
                left.append(each)
                if isinstance(each, str):
                    found.add(each)
    return found


def test_a_node_that_is_gone_leaves_nothing_behind() -> None:
    state = state_of()
    node = "former-node"
    sits, waits = pod(uid="former-sits", name="q", node=node), pod(uid="former-waits")
    given = gpunode(
        shared("former-device"),
        name=node,
        promises={"former-sits": promise({"former-device": GIB})},
        pods=[use("former-sits", "former-device")],
    )
    beat = lease(STAMP)
    beat = type(beat)(metadata=ObjectMeta(name=node, annotations=beat.metadata.annotations))
    spec = ResourceSliceSpec(driver="gpu.nvidia.com", node_name=node, devices=[{}])
    piece = ResourceSlice(metadata=ObjectMeta(name="former-slice"), spec=spec)
    state.apply([*seen(kube_node(node), given, sits, waits), HeartbeatSeen(beat, NOW_S)])
    state.apply([BindBegun(waits, node), SliceSeen(piece)])
    assert {name for name in names_in(state) if name.startswith("former-")} >= {
        node,
        "former-slice",
    }
    state.apply(
        [BindEnded("former-waits", node), PodGone("former-waits"), SliceGone("former-slice")]
    )
    state.apply([PodGone("former-sits"), HeartbeatGone(node), GPUNodeGone(node), NodeGone(node)])
    state.take_unsettled()
    state.observations.take()
    state.snapshot()
    assert {name for name in names_in(state) if name.startswith("former-")} == set()
