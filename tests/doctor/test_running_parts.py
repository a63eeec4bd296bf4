"""Tests that the doctor reports a scheduler, webhook or console that does not run."""

from pathlib import Path

import pytest
import yaml

from headroom.doctor.environment import Environment, examine_environment
from headroom.doctor.findings import line
from headroom.doctor.running_parts import Leader, lease_of, leases_of
from headroom.runtime.settings.settings import Settings
from tests.doctor.test_recommendation_rule import component

DEPLOY = Path(__file__).parents[2] / "deploy"


def found(*waits: str, leaders: tuple[Leader, ...] = ()) -> list[str]:
    """Return the findings if these components wait."""
    parts = ("extender", "webhook", "console", "recorder")
    pods = [component(each, "CrashLoopBackOff" if each in waits else "") for each in parts]
    around = Environment(pods, leaders=leaders)
    return [line(each) for each in examine_environment(around, Settings(), "1.0")]


@pytest.mark.parametrize(
    ("part", "impact"),
    [
        ("extender", "pods that request GPUs stay pending"),
        ("webhook", "pods that request GPUs are not created"),
        ("console", "kubectl headroom and the page do not work"),
    ],
)
def test_a_part_without_a_ready_pod_is_a_warning(part: str, impact: str) -> None:
    assert found() == []
    assert found(part)[0] == (
        f"warning: headroom-system/{part}-n: no pod of the {part} is ready (CrashLoopBackOff): "
        f"{impact}. To do: run: kubectl -n headroom-system describe deployment,pods "
        f"-l app.kubernetes.io/component={part}."
    )


def test_a_scheduler_that_stopped_to_renew_its_lease_is_a_warning() -> None:
    lease = "headroom-system", "headroom-scheduler", "scheduler-1_x"
    assert found(leaders=(Leader(*lease, 5.0),)) == []
    assert found(leaders=(Leader(*lease, 300.4),)) == [
        "warning: Lease headroom-system/headroom-scheduler: kube-scheduler scheduler-1_x has not "
        "renewed it for 300 s, so no scheduler that calls Headroom runs: pods that request GPUs "
        "stay pending. To do: look at its pods and their logs: kubectl -n headroom-system get "
        "pods."
    ]


def test_the_lease_is_read_from_the_configuration_of_the_scheduler() -> None:
    shipped = yaml.safe_load((DEPLOY / "base/kube-scheduler.yaml").read_text())
    assert lease_of(shipped) == ("headroom-system", "headroom-scheduler")
    assert lease_of({}) == ("kube-system", "kube-scheduler")
    assert lease_of({"leaderElection": {"leaderElect": False}}) is None
    assert lease_of([]) == ("kube-system", "kube-scheduler")
    configs: dict[str, object] = {"a": shipped, "b": {}}
    assert leases_of(configs, lambda config: config is shipped) == [
        ("headroom-system", "headroom-scheduler")
    ]
