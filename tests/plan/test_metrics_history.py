"""Reads histories from the metrics of dcgm-exporter before and since 4.9.0."""

import pytest

from headroom.errors import BadSettings
from headroom.planner.metrics_history import history_of
from headroom.runtime.metric_history import Answers, Sample
from headroom.runtime.promql import EVERY_CLUSTER

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
    """Return query results about a pod that ran for an hour on the only GPU of node n."""
    of = EVERY_CLUSTER
    found: Answers = {name: [] for name in (*of.totals(1), *of.lives, *of.use, *of.nodes)}
    requests = POD | {"container": "main", "node": "n"}
    found["gpus"] = [Sample(requests, 1.0)]
    found["first"], found["last"] = [Sample(requests, 1000.0)], [Sample(requests, 4600.0)]
    found["created"] = [Sample(POD, 1000.0)]
    found["node"] = [Sample({"node": "n", "resource": "nvidia_com_gpu"}, 1.0)]
    found["devices"] = [Sample(SHOWN | {host: "n"}, 1.0)]
    for name, value in figures.items():
        found[name] = [Sample(SHOWN | {host: "n"}, value)]
    return found


def with_labels(of: Answers, **labels: str) -> Answers:
    """Return the results with these labels in the series of dcgm-exporter."""
    return {
        name: [Sample({**s.labels, **labels}, s.value) if "UUID" in s.labels else s for s in given]
        for name, given in of.items()
    }


@pytest.mark.parametrize(
    "labels",
    [
        pytest.param(
            {"Hostname": "dcgm-exporter-57pvc", "node": "n"}, id="by the label of the target"
        ),
        pytest.param({"Hostname": "dcgm-exporter-57pvc"}, id="by the pod on the GPU"),
        pytest.param({"Hostname": "n.example.org"}, id="a name with its domain"),
    ],
)
def test_the_node_is_found_if_the_exporter_reports_another_host_name(
    labels: dict[str, str],
) -> None:
    """Without NODE_NAME in its environment, dcgm-exporter reports the name of its own pod."""
    history = history_of(with_labels(answers("Hostname", OLD), **labels), 0.0, 100_000.0, {})
    ((machine,), (life,)) = history.machines, history.lives
    assert (machine.name, machine.memory_bytes, life.peak_bytes) == ("n", 46_068 * MIB, 6000 * MIB)


def test_a_host_name_that_matches_several_nodes_is_not_used() -> None:
    given = with_labels(answers("Hostname", OLD), Hostname="exporter")
    other = {"namespace": "team", "pod": "q", "uid": "v"}
    given["gpus"].append(Sample(other | {"container": "main", "node": "m"}, 1.0))
    shown = {"exported_namespace": "team", "exported_pod": "q", "Hostname": "exporter"}
    given["fb_used"].append(Sample(GPU | shown, 1.0))
    with pytest.raises(BadSettings, match="has no node with both"):
        history_of(given, 0.0, 100_000.0, {})


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
def test_names_and_units_of_both_versions_are_read(
    host: str, figures: dict[str, float], used_bytes: int, memory_bytes: int
) -> None:
    history = history_of(answers(host, figures), 0.0, 100_000.0, {})
    ((machine,), (life,)) = history.machines, history.lives
    assert (machine.name, machine.model, machine.memory_bytes) == ("n", "L40S", memory_bytes)
    assert (life.peak_bytes, life.sm_ratio) == (used_bytes, 0.25)
    assert life.utilization_ratio is None


def test_gpu_utilization_is_attributed_to_the_pod_unless_the_gpu_is_shared() -> None:
    found = answers("hostname", OLD | {"utilization": 75.0})
    (life,) = history_of(found, 0.0, 100_000.0, {}).lives
    assert life.utilization_ratio == 0.75
    found["node"] = [Sample({"node": "n", "resource": "nvidia_com_gpu"}, 4.0)]
    (life,) = history_of(found, 0.0, 100_000.0, {}).lives
    assert life.utilization_ratio is None


def test_values_repeated_for_each_pod_are_not_attributed() -> None:
    """dcgm-exporter adds ``vgpu`` to them. Replicas of the node also show that GPUs are shared."""
    for each in ({"vgpu": "1"}, {"exported_vgpu": "1"}):
        found = answers("Hostname", OLD | {"utilization": 75.0})
        for name in ("fb_used", "sm DCGM_FI_PROF_SM_ACTIVE", "utilization"):
            found[name] = [Sample({**s.labels, **each}, s.value) for s in found[name]]
        (life,) = history_of(found, 0.0, 100_000.0, {}).lives
        assert (life.peak_bytes, life.sm_ratio, life.utilization_ratio) == (None, None, None)
    found = answers("Hostname", OLD)
    found["node"] = [Sample({"node": "n", "resource": "nvidia_com_gpu_shared"}, 4.0)]
    (life,) = history_of(found, 0.0, 100_000.0, {}).lives
    assert (life.peak_bytes, life.sm_ratio) == (None, None)
    found["pod_sm"] = [Sample(SHOWN, 0.125)]
    found["pod_used"] = [Sample(SHOWN, 5.0)]
    (life,) = history_of(found, 0.0, 100_000.0, {}).lives
    assert (life.peak_bytes, life.sm_ratio) == (5, 0.125)


@pytest.mark.parametrize("resource", ["nvidia_com_gpu", "nvidia_com_gpu_shared"])
def test_renamed_resources_are_recognised(resource: str) -> None:
    found = answers("Hostname", OLD)
    found["node"] = [Sample({"node": "n", "resource": resource}, 4.0)]
    found["node"] += [Sample({"node": "n", "resource": "cpu"}, 64.0)]
    ((machine,), (life,)) = (
        (history := history_of(found, 0.0, 100_000.0, {})).machines,
        history.lives,
    )
    assert (machine.gpus, machine.cpu_milli, life.peak_bytes) == (1, 64_000, None)


def test_mig_devices_count_as_parts_of_their_gpu() -> None:
    found = answers("Hostname", OLD)
    resource = "nvidia_com_mig_1g_10gb"
    found["node"] = [Sample({"node": "n", "resource": resource}, 7.0)]
    found["gpus"] = [Sample({**each.labels, "resource": resource}, 1.0) for each in found["gpus"]]
    instances = [{**GPU, "Hostname": "n", "GPU_I_ID": str(number)} for number in range(7)]
    found["devices"] = [Sample(each, 1.0) for each in instances]
    found["fb_total"] = [Sample(each, 9728.0) for each in instances]
    used = {**instances[3], "exported_namespace": "team", "exported_pod": "p"}
    found["fb_used"] = [Sample(used, 6000.0)]
    ((machine,), (life,)) = (
        (history := history_of(found, 0.0, 100_000.0, {})).machines,
        history.lives,
    )
    assert (machine.gpus, machine.memory_bytes) == (1, 7 * 9728 * MIB)
    assert (life.peak_bytes, life.request_bytes, life.sm_ratio) == (6000 * MIB, 10 << 30, 0.25)


def test_renamed_pod_labels_of_kube_state_metrics_are_recognised() -> None:
    found = answers("hostname", OLD)
    target = {"namespace": "monitoring", "pod": "ksm", "uid": "k", "container": "ksm", "node": "m"}
    for name in ("gpus", "first", "last", "created", "node"):
        found[name] = [
            Sample(
                target | {f"exported_{k}" if k in target else k: v for k, v in s.labels.items()},
                s.value,
            )
            for s in found[name]
        ]
    ((machine,), (life,)) = (
        (history := history_of(found, 0.0, 100_000.0, {})).machines,
        history.lives,
    )
    assert (machine.name, life.name, life.peak_bytes) == ("n", "team/p", 6000 * MIB)


def test_a_node_cannot_report_the_use_of_pods_on_other_nodes() -> None:
    found = answers("hostname", OLD)
    found["pod_used"] = [Sample({**SHOWN, "node": "other"}, 5.0)]
    found["pod_sm"] = [Sample({**SHOWN, "node": "other"}, 0.5)]
    (life,) = history_of(found, 0.0, 100_000.0, {}).lives
    assert (life.peak_bytes, life.sm_ratio) == (6000 * MIB, 0.25)
    found["pod_used"] += [Sample({**SHOWN, "node": "n"}, 7.0)]
    (life,) = history_of(found, 0.0, 100_000.0, {}).lives
    assert life.peak_bytes == 7
