"""Runs `python -m benchmarks.plan played` for a day, with a real Prometheus.

kube-state-metrics is built only by hand, so ``exported`` simulates its series.
"""

import json
import statistics
from collections.abc import Sequence

import pytest
from typer.testing import CliRunner

from benchmarks.plan import exported, generated, kube_state_metrics
from benchmarks.plan.__main__ import app
from benchmarks.plan.exported import Ran
from tests import debian

pytestmark = pytest.mark.slow

NODES, SCALE, SEED = 4, 0.1, 3


def series(ran: Sequence[Ran], nodes: int, start_s: int) -> tuple[list[str], dict[str, list[str]]]:
    of_nodes = [line for number in range(nodes) for line in exported.node_series(number)]
    return of_nodes, {each.row.name: list(exported.pod_series(each, start_s)) for each in ran}


def test_the_report_contains_the_pods_of_the_played_day(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        debian.prometheus()
    except debian.Unavailable as err:
        pytest.skip(f"needs a real Prometheus: {err}")
    monkeypatch.setattr(kube_state_metrics, "series", series)
    given = ["--days", "1", "--nodes", str(NODES), "--scale", str(SCALE), "--seed", str(SEED)]
    plan = [
        "--device-choice",
        "counting",
        "--replicas",
        "4",
        "--vram",
        "peaks",
        "--seeds",
        "1",
        "--json",
    ]
    found = CliRunner().invoke(app, ["played", *given, *plan])
    printed, error = capfd.readouterr()
    assert found.exit_code == 0, error
    data = json.loads(printed)
    ran = exported.play(generated.rows(1, SEED, SCALE), NODES)
    assert data["pods"] == sum(each.started_s < generated.DAY_S for each in ran) > 10
    assert (data["days"], data["nodes"], data["gpus"]) == (1, NODES, 4 * NODES)
    assert data["models"] == {generated.MODEL: 4 * NODES}
    # All peaks and the SM activity of all pods were found, and trainers use all GPUs of a node.
    assert not any("have no measured peak" in each for each in data["assumptions"])
    peaks = statistics.median(each.row.peak_mib for each in ran) / 1024
    assert f"their median peak was {peaks:.1f} of 45.0 GiB" in data["sentences"][0]
    (unshared,) = data["configurations"][0]["replays"]
    assert unshared["sm_ratio"] > 0
    exclusive = [(each["workload"], each["reason"]) for each in data["exclusive_workloads"]]
    assert exclusive == [("ml/trainer", "4 GPUs a pod")]
