"""Tests the time since which a pod has been idle on a device."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from agent.idle import IdleTimes
from agent.probes.readings import ActivityReading
from headroom.contract.gpunode import PodUse
from tests.agent.lives import BOOTED, GIB, Node, seconds_of

MAX_IDLE = 4096
REPORTED_AFTER_S = 300.0

A = "GPU-a", "c1"


def node_with(path: Path | None = None) -> Node:
    """Return a node whose pod u with container c1 uses 9 GiB of GPU-a without SM activity."""
    node = Node(path)
    node.hold("u")
    node.run("c1", "u")
    node.used[A] = 9 * GIB
    node.sm["GPU-a"] = 0.0, {}
    return node


def idle_since(node: Node, for_s: float, every_s: float = 5.0) -> list[float | None]:
    """Take samples for ``for_s``. Return the distinct values of idleSince in seconds since boot."""
    found: list[float | None] = []
    until_s = node.now_s + for_s
    while node.now_s < until_s:
        row = node.one(every_s)
        value = seconds_of(row.idle_since) if row.idle_since else None
        if value not in found:
            found.append(value)
    return found


def test_a_pod_is_idle_from_the_first_sample_without_sm_activity() -> None:
    node = node_with()
    assert idle_since(node, REPORTED_AFTER_S) == [None]
    assert idle_since(node, 3600.0) == [1005.0]


@pytest.mark.parametrize(
    ("ratio", "shares", "is_idle"),
    [
        pytest.param(0.0, {}, True, id="the device is idle"),
        pytest.param(0.004, {}, True, id="an inexact counter"),
        pytest.param(0.005, {"c1": 0.005}, False, id="the pod is hardly active"),
        pytest.param(0.9, {"c1": 0.9}, False, id="the pod is active"),
        pytest.param(0.9, {"c2": 0.9}, True, id="another pod is active"),
        pytest.param(0.9, {}, False, id="the active pod is unknown"),
        pytest.param(None, {}, False, id="SM activity is unknown"),
    ],
)
def test_the_start_of_idleness_in_each_case(
    ratio: float | None, shares: Mapping[str, float], is_idle: bool
) -> None:
    node = node_with()
    node.run("c2", "v")
    node.sm["GPU-a"] = ratio, shares
    rows = [row for _ in range(62) for row in node.sample() if row.uid == "u"]
    assert bool(rows[-1].idle_since) == is_idle


def test_activity_ends_idleness_and_the_next_idleness_starts_later() -> None:
    node = node_with()
    idle_since(node, 1000.0)
    node.sm["GPU-a"] = 0.5, {"c1": 0.5}
    assert idle_since(node, 5.0) == [None]
    node.sm["GPU-a"] = 0.0, {}
    assert idle_since(node, 400.0) == [None, 2010.0]


def test_a_pod_that_holds_a_device_and_never_uses_it_is_idle() -> None:
    node = Node()
    node.hold("u")
    node.sm["GPU-a"] = 0.0, {}
    assert idle_since(node, 400.0) == [None, 1005.0]


def test_idleness_continues_after_a_restart_of_the_agent_and_of_the_container(
    tmp_path: Path,
) -> None:
    node = node_with(tmp_path / "agent.lives.json")
    idle_since(node, 1000.0)
    node.start_agent()
    node.sm["GPU-a"] = None, {}  # The first sample has no value of SM activity.
    assert idle_since(node, 40.0, every_s=40.0) == [1005.0]
    node.sm["GPU-a"] = 0.0, {}
    node.end("c1")
    node.run("c2", "u")
    assert idle_since(node, 5.0) == [1005.0]


@pytest.mark.parametrize(("gap_s", "since_s"), [(60.0, 1005.0), (61.0, 2056.0)])
def test_idleness_restarts_after_a_gap_in_which_the_pod_may_have_been_active(
    gap_s: float, since_s: float
) -> None:
    node = node_with()
    idle_since(node, 995.0)
    row = node.one(gap_s)
    assert bool(row.idle_since) == (since_s == 1005.0)
    assert idle_since(node, 400.0)[-1] == since_s


def test_a_pod_that_is_missing_from_the_report_for_a_moment_stays_idle() -> None:
    node = node_with()
    idle_since(node, 1000.0)
    holdings, used = [*node.holdings], dict(node.used)
    node.holdings.clear()
    node.used.clear()
    assert node.sample() == []
    node.holdings, node.used = holdings, used
    assert idle_since(node, 5.0) == [1005.0]


def test_a_clock_step_does_not_change_the_start_of_idleness() -> None:
    node = node_with()
    idle_since(node, 400.0)
    node.clock_off_s = 86_400.0
    assert idle_since(node, 400.0) == [1005.0]


def test_idle_times_from_before_a_reboot_are_dropped(tmp_path: Path) -> None:
    node = node_with(tmp_path / "agent.lives.json")
    idle_since(node, 1000.0)
    node.now_s = 10.0
    node.start_agent()
    assert idle_since(node, 400.0) == [None, 15.0]


def test_the_number_of_idle_times_is_limited() -> None:
    times = IdleTimes((), 0.0)
    uses = [PodUse(uid=f"u{number}", device="GPU-a") for number in range(MAX_IDLE + 5)]
    activity = {"GPU-a": ActivityReading("gpm", "GPU-a", sm_ratio=0.0)}
    assert times.measure(uses, activity, {}, 0.0, BOOTED) == uses
    assert len(times.idle) == MAX_IDLE
