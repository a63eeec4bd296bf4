"""Tests preemption on a real control plane with the newest kube-scheduler."""

from collections.abc import Iterator

import pytest

from tests.controlplane import ControlPlane
from tests.e2e.cluster import EVENTS
from tests.e2e.conftest import Tell
from tests.e2e.nodes import GIB
from tests.e2e.preempting import SCENARIOS, TWO_LARGE, Scenario, Stage, assert_right, stage_of
from tests.loopback import LOOPBACK


@pytest.fixture(scope="module")
def whole_stage(plane: ControlPlane, binaries: None) -> Iterator[Stage]:
    """A stage in which pods are also evicted only for memory."""
    with stage_of(plane, {"evict_for_memory": True}) as stage:
        yield stage


@pytest.fixture
def stage(whole_stage: Stage) -> Iterator[Stage]:
    try:
        yield whole_stage
    finally:
        whole_stage.clear()
        whole_stage.mirror(whole_stage.cluster.names, False)


@pytest.mark.parametrize(
    "scenario", [pytest.param(each, id=each.name) for each in SCENARIOS if each.tested]
)
def test_only_required_pods_are_evicted(stage: Stage, scenario: Scenario, tell: Tell) -> None:
    outcome = stage.run(scenario)
    tell(f"{scenario.name}: {outcome.describe()}")
    assert_right(scenario, outcome)


def test_preemption_is_reported_and_no_other_pod_takes_the_freed_memory(stage: Stage) -> None:
    stage.run_batch(TWO_LARGE)
    cluster = stage.cluster
    with stage.played(2.0) as outcome:
        stage.submit("new-0", 20, ["gpu-1"])
        cluster.until(lambda: "deletionTimestamp" in cluster.pod("a")["metadata"], "a leaves")
        uids = {cluster.pod(name)["metadata"]["uid"] for name in ("a", "new-0")}
        # The pod would fit, but the preemptor might then not fit.
        stage.submit("thief", 3, ["gpu-1"], "middle")
        cluster.until(lambda: bool(cluster.node_of("new-0")), "the newcomer is bound")
        assert not cluster.node_of("thief")
        cluster.nodes.give(cluster.pod("new-0"), 0, 20 * GIB)
        cluster.nodes.report(["gpu-1"])
        cluster.until(lambda: bool(cluster.node_of("thief")), "the other one is bound after it")
    assert outcome.evicted == ["a"]

    def shown() -> dict[tuple[str, str], str]:
        return {
            (event["involvedObject"]["name"], event["reason"]): event["message"]
            for event in cluster.plane.call("GET", EVENTS)["items"]
            if event["involvedObject"].get("uid") in uids  # Earlier pods had the same names.
        }

    leaves, others_leave = ("a", "LeavesForGPUMemory"), ("new-0", "OthersLeaveGPU")
    cluster.until(lambda: {leaves, others_leave} <= shown().keys(), "both have an Event")
    assert shown()[leaves].endswith("needs the memory of this pod's GPU.")
    assert shown()[others_leave].startswith("1 pod leaves node gpu-1 for this pod")
    body = LOOPBACK.get(f"{cluster.debug_url()}/v1/explain?pod=e2e/new-0").json()
    preempt = body["last_decision"]["preempt"]
    assert (preempt["node"], preempt["choice"]) == ("gpu-1", "controller")
    assert preempt["lines"][0] == "e2e/a (priority 0) leaves node gpu-1"


def test_the_memory_held_for_a_deleted_preemptor_is_released(stage: Stage) -> None:
    stage.run_batch(TWO_LARGE)
    cluster = stage.cluster
    with stage.played(2.0) as outcome:
        stage.submit("new-0", 20, ["gpu-1"])
        cluster.until(lambda: "deletionTimestamp" in cluster.pod("a")["metadata"], "a leaves")
        cluster.delete_pod("new-0")
        stage.submit("next", 20, ["gpu-1"], "middle")
        cluster.until(lambda: cluster.node_of("next") == "gpu-1", "the next one is bound")
    assert outcome.evicted == ["a"]
