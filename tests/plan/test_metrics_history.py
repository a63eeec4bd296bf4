"""Histories from the metrics of dcgm-exporter before and since 4.9.0."""

import pytest

from extender.plan.metrics_history import AT_END, EACH_DAY, Answers, Sample, history_of

MIB = 1 << 20
POD = {"namespace": "team", "pod": "p", "uid": "u"}
GPU = {"UUID": "GPU-a", "modelName": "L40S"}
SHOWN = GPU | {"exported_namespace": "team", "exported_pod": "p"}
OLD = {"fb_total": 46_068.0, "fb_used": 6000.0, "sm DCGM_FI_PROF_SM_ACTIVE": 0.25}
NEW = {
    "fb_total_bytes": 46_068.0 * MIB + 4096,
    "fb_used_bytes": 6000.0 * MIB + 4096,
    "sm DCGM_FI_PROF_SM_UTIL_RATIO": 0.25,
}


def answers(host: str, figures: dict[str, float]) -> Answers:
    """Return answers about a pod that ran for an hour on the only GPU of node n."""
    found: Answers = {name: [] for name in (*EACH_DAY, *AT_END)}
    requests = POD | {"container": "main", "node": "n"}
    found["gpus"] = [Sample(requests, 1.0)]
    found["first"], found["last"] = [Sample(requests, 1000.0)], [Sample(requests, 4600.0)]
    found["created"] = [Sample(POD, 1000.0)]
    found["node"] = [Sample({"node": "n", "resource": "nvidia_com_gpu"}, 1.0)]
    for name, value in figures.items():
        found[name] = [Sample(SHOWN | {host: "n"}, value)]
    return found


@pytest.mark.parametrize(
    ("host", "figures", "used_bytes", "memory_bytes"),
    [
        pytest.param("Hostname", OLD, 6000 * MIB, 46_068 * MIB, id="4.5"),
        pytest.param("hostname", OLD, 6000 * MIB, 46_068 * MIB, id="4.8.3"),
        pytest.param("hostname", NEW, 6000 * MIB + 4096, 46_068 * MIB + 4096, id="4.9.0"),
        pytest.param(
            "hostname",
            NEW | OLD | {"fb_used": 7000.0},
            7000 * MIB,
            46_068 * MIB + 4096,
            id="an upgrade in the window",
        ),
    ],
)
def test_names_and_units_of_both_kinds_are_read(
    host: str, figures: dict[str, float], used_bytes: int, memory_bytes: int
) -> None:
    history = history_of(answers(host, figures), 0.0, 100_000.0, {})
    ((machine,), (life,)) = history.machines, history.lives
    assert (machine.name, machine.model, machine.memory_bytes) == ("n", "L40S", memory_bytes)
    assert (life.peak_bytes, life.sm_ratio) == (used_bytes, 0.25)
    assert life.utilization_ratio is None


def test_gpu_utilization_is_that_of_the_pod_unless_the_gpu_is_shared() -> None:
    found = answers("hostname", OLD | {"utilization": 0.75})
    (life,) = history_of(found, 0.0, 100_000.0, {}).lives
    assert life.utilization_ratio == 0.75
    found["node"] = [Sample({"node": "n", "resource": "nvidia_com_gpu"}, 4.0)]
    (life,) = history_of(found, 0.0, 100_000.0, {}).lives
    assert life.utilization_ratio is None
