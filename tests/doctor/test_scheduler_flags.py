"""Checks that the doctor compares kube-scheduler's feature gate with the version of its image."""

import subprocess
from typing import Any

import msgspec
import pytest

from headroom.doctor.component_pods import ComponentPod
from headroom.doctor.findings import Finding, Weight
from headroom.doctor.scheduler_flags import BACKOFF_FLAG, accepts_gate, examine_flags
from tests.controlplane import built
from tests.kubernetes_version import UNDER_TEST
from tests.waiting import PATIENCE_S

HEADROOM = {"app.kubernetes.io/name": "headroom", "app.kubernetes.io/component": "extender"}
STATIC = {"component": "kube-scheduler", "tier": "control-plane"}


def scheduler(
    tag: str, *flags: str, ready: bool = True, labels: dict[str, str] | None = None
) -> ComponentPod:
    extender = {"name": "extender", "image": "registry.example/headroom-extender:1"}
    image = f"registry.example/kube-scheduler{tag}"
    own = {"name": "kube-scheduler", "image": image, "command": ["kube-scheduler", *flags]}
    return made(labels or HEADROOM, [own] if labels else [extender, own], ready)


def made(labels: dict[str, str], containers: list[dict[str, Any]], ready: bool) -> ComponentPod:
    conditions = [{"type": "Ready", "status": str(ready)}]
    pod = {
        "metadata": {"namespace": "ns", "name": "scheduler", "labels": labels},
        "spec": {"containers": containers},
        "status": {"conditions": conditions},
    }
    return msgspec.convert(pod, ComponentPod)


def found(*pods: ComponentPod) -> list[Finding]:
    return list(examine_flags(pods))


@pytest.mark.parametrize("tag", [":v1.32.13", ":v1.39.0", ":v2.0.0", ":latest", "@sha256:0"])
def test_an_unready_scheduler_that_may_reject_the_flag_is_reported(
    tag: str,
) -> None:
    assert found(scheduler(tag, BACKOFF_FLAG)) == []
    broken = found(scheduler(tag, BACKOFF_FLAG, ready=False))
    if not tag.startswith(":v"):
        assert broken == []  # The version is unknown.
        return
    (one,) = broken
    assert (one.weight, one.nodes) == (Weight.WARNING, ("ns/scheduler",))
    assert f"kube-scheduler {tag[1:]} is not ready" in one.found
    assert "only 1.33 to 1.38 are known to accept its flag" in one.found
    assert "remove the flag" in one.do
    assert found(scheduler(tag, ready=False)) == []


@pytest.mark.parametrize("tag", [":v1.33.0", ":1.37.2", ":v1.38.0-beta.0", ":v1.36"])
def test_a_scheduler_that_accepts_the_flag_should_have_it(tag: str) -> None:
    with_another = "--feature-gates=A=true,SchedulerPopFromBackoffQ=false"
    assert found(scheduler(tag, BACKOFF_FLAG, ready=False)) == []
    assert found(scheduler(tag, with_another)) == []
    (one,) = found(scheduler(tag))
    assert one.weight is Weight.ADVICE
    assert "retries them without a pause" in one.found


def test_the_clusters_own_scheduler_counts_if_it_calls_headroom() -> None:
    static = scheduler(":v1.37.2", labels=STATIC)
    assert found(static, scheduler(":v1.37.2", BACKOFF_FLAG)) == []
    assert found(static) == []  # Headroom is not installed.
    extender = made(HEADROOM, [{"name": "extender", "image": "registry.example/e:1"}], True)
    (one,) = found(static, extender)
    assert "has no flag" in one.found


@pytest.mark.slow
def test_the_scheduler_under_test_accepts_the_flag_if_its_version_should() -> None:
    binary = str(built("kube-scheduler")["kube-scheduler"])
    command = [binary, BACKOFF_FLAG, "--config=/nonexistent"]
    answer = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    shown = answer.stderr + answer.stdout
    assert answer.returncode != 0
    minor = tuple(map(int, UNDER_TEST.split(".")))
    assert ("feature gate" not in shown) == accepts_gate(minor), shown
    assert ("/nonexistent" in shown) == accepts_gate(minor), shown
