"""Tests which node wins for a pod without a GPU request."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.contract.gpunode import Device
from headroom.core.placement.score import best_for_non_gpu_pod
from headroom.core.placement.snapshot import NodeTerms
from headroom.core.placement.snapshot_builder import build
from tests.builders import FRESH_S, GIB, device, mig, reservation, shared, weighed


def holding(name: str, gib: int, **how: Any) -> NodeTerms:
    """Return a node with one shared 24 GiB GPU on which this amount is reserved."""
    return weighed(
        shared(name), name=name, reservations={"u": reservation({name: gib * GIB})}, **how
    )


def plain(name: str) -> NodeTerms:
    return NodeTerms(name, None, FRESH_S, equipped=False)


def silent(name: str) -> NodeTerms:
    """Return a node with GPUs but without a report."""
    return NodeTerms(name, None, FRESH_S)


def best(*nodes: NodeTerms, unknown: int = 0) -> list[str]:
    snap = build(nodes)
    rows = np.array([*range(len(nodes)), *[-1] * unknown], np.int64)
    chosen = best_for_non_gpu_pod(snap, rows)
    assert not chosen[len(nodes) :].any()
    return [node.name for node, is_best in zip(nodes, chosen, strict=False) if is_best]


def test_the_node_with_the_least_headroom_wins() -> None:
    assert best(holding("empty", 0), holding("full", 20), holding("half", 12)) == ["full"]


def test_headroom_is_compared_in_bytes_not_as_a_share() -> None:
    assert best(holding("small", 0), weighed(shared("a"), shared("b"), name="large")) == ["small"]


def test_nodes_without_gpus_come_first_with_equal_scores() -> None:
    assert best(holding("full", 24), plain("a"), holding("empty", 0), plain("b")) == ["a", "b"]


def test_a_node_without_a_report_comes_last() -> None:
    assert best(silent("silent"), holding("empty", 0)) == ["empty"]
    assert best(silent("silent"), silent("other")) == ["other"]


@pytest.mark.parametrize(
    "nothing",
    [
        pytest.param(shared("d", healthy=False), id="unhealthy"),
        pytest.param(shared("d", free=0, allocated=4), id="no free replica"),
        pytest.param(shared("d", memory_bytes=-1), id="contradictory"),
    ],
)
def test_stranded_memory_does_not_count(nothing: Device) -> None:
    assert best(holding("nearly", 23), weighed(nothing, name="nothing")) == ["nothing"]
    assert best(holding("nearly", 23), weighed(nothing, shared("e"), name="n")) == ["nearly"]


def test_memory_that_two_devices_share_counts_once() -> None:
    instances = mig("MIG-a", 1), mig("MIG-b", 1)
    assert best(weighed(device("d", memory_bytes=15 * GIB), name="gpu"), weighed(*instances)) == [
        "n"
    ]


def test_ties_are_broken_by_name() -> None:
    nodes = [holding(name, 8) for name in ("b", "a", "c")]
    assert best(*nodes) == best(*reversed(nodes)) == ["a"]


def test_unknown_nodes_are_never_returned() -> None:
    assert best(unknown=2) == []
    assert best(holding("full", 24), unknown=2) == ["full"]


@given(st.lists(st.integers(-1, 30), min_size=1, max_size=12))
def test_the_result_equals_a_computation_without_arrays(promised_gib: list[int]) -> None:
    nodes = [
        plain(f"n{i:02}") if gib < 0 else holding(f"n{i:02}", gib)
        for i, gib in enumerate(promised_gib)
    ]
    without = [f"n{i:02}" for i, gib in enumerate(promised_gib) if gib < 0]
    fullest = max(range(len(nodes)), key=lambda i: (min(promised_gib[i], 24), -i))
    assert best(*nodes) == (without or [f"n{fullest:02}"])
