"""Checks that the extender and the agent subtract the same amounts from a device's memory.
Otherwise, the agent would block pods for which the extender has reserved memory.
"""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from agent.gate_service import GateService
from agent.gate_starts import GateStarts
from agent.steering.messages import ContainerRequest
from agent.steering.plugin_proxy import Rejected
from agent.steering.preferred_allocation import PreferredAllocation
from headroom.contract.annotations import RESERVE, DeviceChoice
from headroom.contract.gpunode import Device, GPUNode, Plugin, Source
from headroom.contract.watched import GPUNodeSeen, NodeSeen
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.placement_record import Placement
from headroom.core.placement.policy import Rules
from tests.builders import (
    GIB,
    GPU,
    MIB,
    NOW_S,
    STAMP,
    gpunode,
    kube_node,
    pod,
    reservation,
    shared,
    use,
)

#: Each case has the unattributed use, the reserve, and whether a pod that requests 20 GiB fits on
#: the 24 GiB device.
CASES = [
    pytest.param(0, 4 * GIB, True, id="all memory except the reserve"),
    pytest.param(0, 4 * GIB + 1, False, id="one byte more than the reserve"),
    pytest.param(64 * MIB, 4 * GIB, True, id="the tolerated use"),
    pytest.param(64 * MIB + 1, 4 * GIB, False, id="one byte more than the tolerated use"),
    pytest.param(4 * GIB + 64 * MIB, 0, True, id="much and what is tolerated"),
    pytest.param(4 * GIB + 64 * MIB + 1, 0, False, id="a byte more than much"),
]


def device(unattributed_bytes: int, taken: int = 0) -> Device:
    use_bytes = {"used_bytes": unattributed_bytes, "unattributed_bytes": unattributed_bytes}
    return shared("D", free=2 - taken, allocated=taken, **use_bytes)


def of_node(unattributed_bytes: int, arrived: bool) -> GPUNode:
    """Return the node with the reservation of the pod. The report shows the pod only if it has
    ``arrived``.
    """
    node = gpunode(
        device(unattributed_bytes, taken=int(arrived)),
        reservations={"p": reservation({"D": 20 * GIB}, choices=["D"])},
        pods=[use("p", "D", replica="D::0")] if arrived else (),
        plugin=Plugin(steered=[GPU]),
    )
    assert node.status is not None
    node.status.sources.append(Source("checkpoint"))
    return node


def extender_promises(unattributed_bytes: int, reserve_bytes: int, folder: Path) -> bool:
    state = ClusterWriter(Rules(), 90.0, datetime.fromisoformat(STAMP).timestamp() - NOW_S)
    node = gpunode(device(unattributed_bytes))
    asked = kube_node(annotations={RESERVE: str(reserve_bytes)})
    state.apply([NodeSeen(asked), GPUNodeSeen(node, NOW_S)])
    return isinstance(state.cluster.judge(pod("20Gi"), node, NOW_S), Placement)


class Ledger:
    def __init__(self, node: GPUNode) -> None:
        self._node = node

    def gpunode(self, within_s: float = 0.0) -> GPUNode:
        return self._node


def gate_opens(unattributed_bytes: int, reserve_bytes: int | None, folder: Path) -> bool:
    node = of_node(unattributed_bytes, arrived=True)
    gate_service = GateService(
        Ledger(node), lambda: node.status, lambda: reserve_bytes, lambda: 0.0, GateStarts(None)
    )
    return gate_service.ask("p").answer == "yes"


def steering_gives(unattributed_bytes: int, reserve_bytes: int | None, folder: Path) -> bool:
    node = of_node(unattributed_bytes, arrived=False)
    nowhere = folder / "checkpoint", folder / "no.sock"
    told: Any = (Ledger(node), lambda: node.status, lambda: reserve_bytes)
    allocation = PreferredAllocation(
        *nowhere,
        *told,
        lambda: DeviceChoice.STEERED,
        lambda: "v1.36.3",
        lambda: None,
        patience_s=0.0,
    )
    try:
        return allocation._choose(GPU, ContainerRequest(("D::0", "D::1"), (), 1)) == ("D::0",)
    except Rejected:
        return False


@pytest.mark.parametrize("side", [extender_promises, gate_opens, steering_gives])
@pytest.mark.parametrize(("unattributed_bytes", "reserve_bytes", "room"), CASES)
def test_extender_and_agent_compute_equal_free_bytes(
    side: Callable[..., bool],
    unattributed_bytes: int,
    reserve_bytes: int,
    room: bool,
    tmp_path: Path,
) -> None:
    assert side(unattributed_bytes, reserve_bytes, tmp_path) is room


@pytest.mark.parametrize("side", [gate_opens, steering_gives])
def test_an_unknown_reserve_of_the_node_is_not_guessed(
    side: Callable[..., bool], tmp_path: Path
) -> None:
    assert side(0, 0, tmp_path)
    assert not side(0, None, tmp_path)
