"""Tests preemption for GPU memory by kube-scheduler 1.38 itself, without evict_for_memory and the
mirror.

Older versions cannot do this, and the setting must not affect them.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.controlplane import ControlPlane
from tests.e2e.conftest import Tell
from tests.e2e.preempting import SCENARIOS, TWO_LARGE, Scenario, Stage, assert_right, stage_of
from tests.e2e.retries import DEFAULT_GATES

pytestmark = pytest.mark.since("1.38")

#: The scenarios whose result differs without the mirror.
NATIVE = {
    (*each.running, *each.newcomers, each.grace_s, *each.guarded): replace(
        each, name=each.name.removesuffix(", mirrored"), mirrored=False
    )
    for each in reversed(SCENARIOS)
}


@pytest.fixture(scope="module", params=[(), DEFAULT_GATES], ids=["shipped gates", "default gates"])
def whole_stage(
    plane: ControlPlane, binaries: None, request: pytest.FixtureRequest
) -> Iterator[Stage]:
    with stage_of(plane, {"preempt_for_memory": True}, request.param) as stage:
        yield stage


@pytest.fixture
def stage(whole_stage: Stage) -> Iterator[Stage]:
    try:
        yield whole_stage
    finally:
        whole_stage.clear()


def assert_not_overcommitted(stage: Stage) -> None:
    assert stage.cluster.metric("headroom_fleet_headroom_bytes") > 0  # The metrics are served.
    assert stage.cluster.metric("headroom_fleet_overcommitted_bytes") == 0


@pytest.mark.parametrize("scenario", [pytest.param(s, id=s.name) for s in NATIVE.values()])
def test_kube_scheduler_evicts_only_required_pods(
    stage: Stage, scenario: Scenario, tell: Tell
) -> None:
    outcome = stage.run(scenario)
    tell(f"1.38, {scenario.name}: {outcome.describe()}")
    assert_right(scenario, outcome)
    assert_not_overcommitted(stage)


def test_the_pod_is_nominated_and_no_other_pod_takes_the_freed_memory(stage: Stage) -> None:
    stage.run_batch(TWO_LARGE)
    cluster = stage.cluster
    with stage.played(2.0) as outcome:
        stage.submit("new-0", 20, ["gpu-1"])
        cluster.until(lambda: "deletionTimestamp" in cluster.pod("a")["metadata"], "a leaves")
        cluster.until(
            lambda: cluster.pod("new-0")["status"].get("nominatedNodeName") == "gpu-1",
            "kube-scheduler nominates the pod",
        )
        stage.submit("thief", 3, ["gpu-1"], "middle")
        cluster.until(lambda: bool(cluster.node_of("new-0")), "the new pod is bound")
        assert not cluster.node_of("thief")
    assert outcome.evicted == ["a"]
    assert_not_overcommitted(stage)
