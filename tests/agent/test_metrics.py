"""Checks that /metrics has the documented names and labels and counts nothing twice."""

from collections import Counter

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from agent.attribution import pod_sm
from agent.metrics import AgentCollector, Sample, SampleCollector
from agent.probes.readings import ActivityReading, HoldingReading, MirrorReading, ProcessReading
from headroom.contract.gpunode import (
    ContainerLimit,
    Device,
    GPUNodeStatus,
    PodUse,
    Replicas,
    SmActivity,
    Source,
)
from tests.monitoring.documented import documented
from tests.promtool import complaints

GPU = "nvidia.com/gpu"
H100 = "NVIDIA H100 80GB HBM3"


def mig(uuid: str, instance: int, profile: str, **figures: int) -> Device:
    return Device(
        uuid,
        index=1,
        model=f"{H100} MIG {profile}",
        kind="mig",
        parent="GPU-b",
        gpu_instance=instance,
        resource=f"nvidia.com/mig-{profile}",
        replicas=Replicas(allocated=1),
        memory_bytes=1000,
        reserved_bytes=10,
        used_bytes=figures.get("used", 0),
        unattributed_bytes=figures.get("unattributed", 0),
    )


STATUS = GPUNodeStatus(
    "2026-11-21T13:10:00.5Z",
    [
        Device(
            "GPU-a",
            index=0,
            model=H100,
            memory_bytes=5000,
            reserved_bytes=50,
            used_bytes=900,
            unattributed_bytes=100,
            sm_activity=SmActivity(0.5, "gpm", 0.25),
            sm_occupancy_ratio=0.125,
            utilization_ratio=1.0,
            sharing="time-slicing",
            resource=GPU,
            replicas=Replicas(free=1, allocated=2, unhealthy=1),
            healthy=False,
            health_codes=["xid", "remap"],
        ),
        mig("MIG-1", 1, "1c.2g.20gb", used=300, unattributed=30),
        mig("MIG-2", 1, "1c.2g.20gb", used=300),
        mig("MIG-3", 2, "1g.10gb"),
        Device("GPU-c", index=2, model="lost", healthy=False, health_codes=["lost"]),
    ],
    [
        PodUse(
            *("u1", "GPU-a", "ns", "p", "main", f"{GPU}::0", 800),
            peak_bytes=900,
            startup_peak_bytes=850,
            peak_source="nvml",
            started_at="2026-11-21T11:05:00Z",
            settled_at="2026-11-21T11:06:30Z",
            idle_since="2026-11-21T11:10:00Z",
        ),
        PodUse("u1", "GPU-a", "ns", "p", "main", f"{GPU}::1", 0),
        PodUse("u1", "GPU-a", "ns", "p", "side", f"{GPU}::2", 0),
        PodUse(
            *("u2", "MIG-2", "ns", "q", "main", "MIG-2", None),
            started_at="2026-11-21T11:05:00Z",
        ),
        PodUse("u3", "GPU-gone", "ns", "r", "main", "x", 7),
    ],
    [
        ContainerLimit("u1", "GPU-a", "c1", "main", "ns", "p", 700, 500, 1000),
        ContainerLimit("u9", "GPU-a", "c2", used_bytes=9),
        ContainerLimit("u3", "GPU-gone", "c3", used_bytes=9),
    ],
    sources=[Source("nvml"), Source("dcgm", "absent", "nobody")],
    agent_version="1.2",
    driver_version="580",
    cuda_version="13.0",
)


def text_of(shown: Sample | None) -> str:
    registry = CollectorRegistry()
    answers = None if shown is None else {("nvidia.com/gpu", "reserved"): 7}
    registry.register(AgentCollector(lambda: shown, {("report", "accepted"): 3}, answers))
    registry.register(SampleCollector(lambda: shown))
    return generate_latest(registry).decode()


def families(shown: Sample | None) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text_of(shown))}


SHOWN = Sample("n1", STATUS, 2.5, {("u1", "GPU-a"): 0.4, ("u9", "GPU-a"): 0.1})


@pytest.fixture(scope="module")
def reported() -> dict[str, Metric]:
    return families(SHOWN)


def values(metric: Metric, *labels: str) -> dict[tuple[str, ...], float]:
    return {tuple(s.labels[each] for each in labels): s.value for s in metric.samples}


def test_every_series_is_exposed_once_and_every_name_is_documented(
    reported: dict[str, Metric],
) -> None:
    series = Counter(
        (sample.name, *sorted(sample.labels.items()))
        for metric in reported.values()
        for sample in metric.samples
    )
    assert set(series.values()) == {1}
    listed = documented("The agent")
    samples = [s for metric in reported.values() for s in metric.samples]
    assert {s.name for s in samples} == listed.keys()
    for sample in samples:
        assert sample.labels.keys() == listed[sample.name].labels, sample.name


def test_names_follow_the_conventions_of_prometheus() -> None:
    assert complaints(text_of(SHOWN)) == []


def test_devices_have_dcgms_labels_and_instances_that_share_memory_have_one_series(
    reported: dict[str, Metric],
) -> None:
    used = reported["headroom_device_used_bytes"]
    labels = ("gpu", "UUID", "Hostname", "model_name", "GPU_I_ID", "GPU_I_PROFILE")
    assert values(used, *labels) == {
        ("0", "GPU-a", "n1", H100, "", ""): 900,
        ("1", "GPU-b", "n1", H100, "1", "2g.20gb"): 300,
        ("1", "GPU-b", "n1", H100, "2", "1g.10gb"): 0,
    }
    unattributed = reported["headroom_device_unattributed_bytes"]
    assert values(unattributed, "UUID", "GPU_I_ID") == {
        ("GPU-a", ""): 100, ("GPU-b", "1"): 30, ("GPU-b", "2"): 0
    }  # fmt: skip
    replicas = reported["headroom_device_replicas"]
    counts = values(replicas, "UUID", "GPU_I_ID", "sharing", "state")
    assert counts["GPU-a", "", "time-slicing", "free"] == 1
    assert counts["GPU-a", "", "time-slicing", "unhealthy"] == 1
    assert counts["GPU-b", "1", "none", "allocated"] == 2


def test_activity_has_a_source_label_and_utilisation_is_a_separate_metric(
    reported: dict[str, Metric],
) -> None:
    def only(name: str) -> dict[tuple[str, ...], float]:
        return values(reported[name], "UUID", *(["source"] if "activity" in name else []))

    assert only("headroom_device_sm_activity_ratio") == {("GPU-a", "gpm"): 0.5}
    assert only("headroom_device_sm_occupancy_ratio") == {("GPU-a",): 0.125}
    assert only("headroom_device_utilization_ratio") == {("GPU-a",): 1.0}


def test_health_has_stable_codes(reported: dict[str, Metric]) -> None:
    assert values(reported["headroom_device_unhealthy_reason"], "UUID", "reason") == {
        ("GPU-a", "xid"): 1, ("GPU-a", "remap"): 1, ("GPU-c", "lost"): 1
    }  # fmt: skip
    assert values(reported["headroom_device_healthy"], "UUID")["GPU-c",] == 0


def test_the_use_of_a_pod_is_reported_once_for_each_device(reported: dict[str, Metric]) -> None:
    used = reported["headroom_pod_used_bytes"]
    assert values(used, "UUID", "namespace", "pod", "container", "pod_uid") == {
        ("GPU-a", "ns", "p", "main", "u1"): 800,
        ("GPU-a", "ns", "p", "side", "u1"): 0,
    }
    peak = values(reported["headroom_pod_peak_bytes"], "pod", "container", "source")
    assert peak == {("p", "main", "nvml"): 900}
    sm = reported["headroom_pod_sm_activity_ratio"]
    assert values(sm, "pod", "container", "source") == {("p", "main", "nvml-process"): 0.4}


def test_the_agent_reports_metrics_about_itself(reported: dict[str, Metric]) -> None:
    (build,) = reported["headroom_agent_build_info"].samples
    assert build.labels == {"version": "1.2", "driver_version": "580", "cuda_version": "13.0"}
    states = values(reported["headroom_agent_source_state"], "source", "state")
    assert {key for key, value in states.items() if value} == {("nvml", "ok"), ("dcgm", "absent")}
    assert len(states) == 6
    writes = values(reported["headroom_agent_writes"], "kind", "outcome")
    assert writes == {
        ("report", "accepted"): 3, ("report", "failed"): 0,
        ("heartbeat", "accepted"): 0, ("heartbeat", "failed"): 0,
    }  # fmt: skip
    assert values(reported["headroom_agent_sample_age_seconds"]) == {(): 2.5}
    steered = values(reported["headroom_agent_steered"], "resource", "result")
    assert steered == {("nvidia.com/gpu", "reserved"): 7}


def test_before_the_first_sample_there_are_no_device_metrics() -> None:
    assert families(None).keys() == {"headroom_agent_writes"}


def test_sm_time_of_processes_is_attributed_to_their_pods() -> None:
    uid, static = "0000000a-1111-4222-8333-00000000000a", "0123456789abcdef0123456789abcdef"
    readings = [
        ActivityReading("dcgm", "GPU-a", sm_ratio=0.9, sm_by_pid={1: 0.5, 2: 0.25, 3: 0.1, 9: 0.1}),
        ActivityReading("nvml-process", "GPU-b", sm_by_pid={1: 0.7, 2: 0.7, 4: 0.2}),
        ProcessReading("proc", 1, pod=uid),
        ProcessReading("proc", 2, pod=uid),
        ProcessReading("proc", 3),
        ProcessReading("proc", 4, pod=static),
        HoldingReading("checkpoint", static, "main", GPU, "GPU-b"),
        MirrorReading("mirrors", static, "mirror", "ns", "static"),
    ]
    assert pod_sm(readings) == {
        (uid, "GPU-a"): 0.75, (uid, "GPU-b"): 1.0, ("mirror", "GPU-b"): 0.2
    }  # fmt: skip
