"""What nodes show of their memory to the rest of Kubernetes, and when it is written."""

import msgspec
import pytest

from contract.gpunode import Device
from contract.kube import Node, NodeStatus
from extender.placement.policy import Rules
from extender.state.changes import GPUNodeSeen, NodeSeen
from extender.state.cluster_writer import ClusterWriter
from extender.state.extended_resource import Shown, to_show
from tests.builders import GIB, MIB, NOW_S, device, gpunode, kube_node, mig, shared


def showing(amount: str | None) -> Node:
    allocatable = {} if amount is None else {"headroom.gpu/vram": amount}
    return msgspec.structs.replace(kube_node(), status=NodeStatus(allocatable=allocatable))


def due(shows: str | None, *devices: Device, wanted: bool = True) -> list[Shown]:
    state = ClusterWriter(Rules(), 90.0, 0.0)
    state.apply([NodeSeen(showing(shows)), GPUNodeSeen(gpunode(*devices), NOW_S)])
    return list(to_show(state, wanted))


@pytest.mark.parametrize(
    ("devices", "mib"),
    [
        pytest.param([device(), device("GPU-1")], 48 << 10, id="two of 24 GiB"),
        pytest.param([shared(reserved_bytes=GIB)], 23 << 10, id="less what the driver keeps"),
        pytest.param([device(memory_bytes=8 * GIB - 1)], (8 << 10) - 1, id="rounded down"),
        pytest.param([device(), device("GPU-1", healthy=False)], 24 << 10, id="less the broken"),
        pytest.param(
            [mig("MIG-a", 1), mig("MIG-b", 1), mig("MIG-c", 2)],
            20 << 10,
            id="instances that share a memory count once",
        ),
        pytest.param([device(), device("GPU-1", resource="other/gpu")], 24 << 10, id="ours alone"),
    ],
)
def test_a_node_shows_what_it_can_promise(devices: list[Device], mib: int) -> None:
    assert due(None, *devices) == [Shown("n", mib)]


def test_what_is_right_is_not_written_again() -> None:
    assert due("24576", device()) == []
    assert due("80k", device(memory_bytes=80_000 * MIB)) == []  # as the API server spells it
    assert due("what?", device()) == [Shown("n", 24 << 10)]


def test_of_what_is_not_known_nothing_is_written() -> None:
    assert due(None) == []
    assert due("24576") == []


def test_switched_off_it_is_taken_back() -> None:
    assert due("24576", device(), wanted=False) == [Shown("n", None)]
    assert due(None, device(), wanted=False) == []
