"""Reads recordings and snapshots of a cluster as the history of a plan."""

import json
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from headroom.contract.gpunode import GPUNode, SmActivity
from headroom.contract.kube import Node, ObjectMeta, OwnerReference, Pod, ResourceRequirements
from headroom.contract.watched import GPUNodeSeen, NodeGone, NodeSeen, PodGone, PodSeen, Relisted
from headroom.core.journal.dump import FORMAT, inputs_of
from headroom.errors import BadSettings
from headroom.planner import recording as module
from headroom.planner.api_objects import cpu_milli
from headroom.planner.cluster_recorder import Recorder, kinds
from headroom.planner.recording import (
    Recording,
    history_of,
    history_of_snapshot,
    read_recording,
)
from tests.builders import GIB, GPU, container, device, gpunode, kube_node, pod, use

START_S = 1_800_000_000.0


def stamp(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat()


def bound(uid: str, at_s: float = START_S, vram: str | None = "8Gi", **more: str | None) -> Pod:
    return pod(vram, uid=uid, name=uid, node="n", created=stamp(at_s), **more)  # type: ignore[arg-type]


def node(*pods_on: object) -> GPUNode:
    """Return node n with two GPUs. ``pods_on`` are the rows of its report."""
    activity = {"sm_activity": SmActivity(0.4), "utilization_ratio": 0.7}
    busy = device("GPU-1", model="L4", reserved_bytes=GIB, **activity)  # type: ignore[arg-type]
    crowded = device("GPU-0", model="L4", sm_activity=SmActivity(0.9), utilization_ratio=1.0)
    return gpunode(crowded, busy, pods=pods_on)  # type: ignore[arg-type]


@pytest.fixture
def recording() -> Recording:
    found = Recording(started_s=START_S, until_s=START_S)
    found.node_seen(kube_node(), node().status)
    return found


def test_a_bound_pod_is_recorded_with_its_request_and_workload(recording: Recording) -> None:
    asked = container()
    resources = ResourceRequirements(limits={GPU: "2"}, requests={"cpu": "1500m", "memory": "16Gi"})
    asked = msgspec.structs.replace(asked, resources=resources)
    owner = OwnerReference(kind="ReplicaSet", name="web-6d4b75cb6d", controller=True)
    seen = pod("8Gi", asked, uid="a", name="web-6d4b75cb6d-x", node="n", created=stamp(START_S))
    seen = msgspec.structs.replace(
        seen, metadata=msgspec.structs.replace(seen.metadata, owner_references=[owner])
    )
    recording.pod_seen(seen, START_S + 7)
    recording.pod_seen(pod(uid="unbound"), START_S)
    recording.pod_seen(pod(None, container(gpus=0), uid="cpu", node="n"), START_S)
    recording.contact(START_S + 100)
    (life,) = history_of(recording).lives
    assert (life.name, life.workload) == ("default/web-6d4b75cb6d-x", "default/web")
    assert (life.gpus, life.request_bytes) == (2, 8 * GIB)
    assert (life.cpu_milli, life.host_bytes) == (1500, 16 * GIB)
    # The pod has no start time, so it started when it was first seen.
    assert (life.created_s, life.run_s) == (0.0, 93.0)


def test_the_highest_peak_counts_and_activity_only_while_a_pod_is_alone(
    recording: Recording,
) -> None:
    for uid in ("alone", "both-1", "both-2"):
        recording.pod_seen(bound(uid), START_S)
    rows = [use("both-1", "GPU-0", GIB), use("both-2", "GPU-0", None)]
    for used, peak in ((2 * GIB, None), (GIB, 5 * GIB), (3 * GIB, 4 * GIB)):
        row = use("alone", "GPU-1", used, peak_bytes=peak)
        recording.node_seen(kube_node(), node(row, *rows).status)
    found = {life.name.removeprefix("default/"): life for life in history_of(recording).lives}
    assert (found["alone"].peak_bytes, found["alone"].sm_ratio) == (5 * GIB, pytest.approx(0.4))
    assert found["alone"].utilization_ratio == pytest.approx(0.7)
    assert (found["both-1"].peak_bytes, found["both-1"].sm_ratio) == (GIB, None)
    assert found["both-1"].utilization_ratio is None
    assert (found["both-2"].peak_bytes, found["both-2"].sm_ratio) == (None, None)
    history = history_of(recording)
    assert (history.machines[0].gpus, history.machines[0].memory_bytes) == (2, 23 * GIB)
    assert any("1 of 3 pods have no measured peak" in note for note in history.assumptions)


def test_pods_end_when_they_are_deleted_or_at_the_last_contact(recording: Recording) -> None:
    for uid in ("gone", "ended", "missed", "runs"):
        recording.pod_seen(bound(uid), START_S)
    recording.pod_gone("gone", START_S + 50)
    recording.pod_seen(bound("ended", phase="Succeeded"), START_S + 60)
    recording.contact(START_S + 100)
    recording.pods_listed({"runs"}, START_S + 7300)
    history = history_of(recording)
    runs = {life.name.removeprefix("default/"): life.run_s for life in history.lives}
    assert runs == {"gone": 50.0, "ended": 60.0, "missed": 100.0, "runs": 7300.0}
    assert "Nothing was recorded in 1 gap, 2.0 h in total" in " ".join(history.assumptions)
    recording.pods_listed({"runs"}, START_S + 7400)  # A watch may be silent for a minute.
    assert len(recording.gaps) == 1


def test_pods_from_before_the_recording_count_from_its_start(recording: Recording) -> None:
    recording.pod_seen(bound("old", START_S - 1000), START_S)
    recording.contact(START_S + 100)
    history = history_of(recording)
    assert (history.lives[0].created_s, history.lives[0].run_s) == (0.0, 100.0)
    assert history.assumptions[:2] == (
        "1 pod began before the recording, and only the time in it counts.",
        "1 pod still ran at the end of the recording, which counts as the end.",
    )


def test_beyond_the_limit_the_first_ended_pods_are_dropped(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_PODS", 100)
    for number in range(100):
        recording.pod_seen(bound(f"p{number}"), START_S)
        if number >= 50:
            recording.pod_gone(f"p{number}", START_S + number)
    recording.pod_seen(bound("new"), START_S + 200)
    assert len(recording.pods) == 100
    assert "p50" not in recording.pods
    assert {"p0", "p51", "new"} <= recording.pods.keys()
    assert "1 pods were dropped" in " ".join(history_of(recording).assumptions)


def test_a_recording_read_from_its_file_is_unchanged(recording: Recording, tmp_path: Path) -> None:
    recording.pod_seen(bound("a"), START_S)
    recording.pods_listed({"a"}, START_S + 500)
    file = tmp_path / "cluster.json"
    file.write_bytes(msgspec.json.encode(recording))
    assert read_recording(file) == recording
    file.write_text("{}")
    with pytest.raises(BadSettings, match=r"not a recording: .*Example: headroom plan record"):
        read_recording(file)
    file.write_bytes(msgspec.json.encode(recording).replace(b"recording/v1alpha1", b"other"))
    with pytest.raises(BadSettings, match=r"its format is 'headroom\.gpu/other'"):
        read_recording(file)


def test_an_empty_recording_is_an_error() -> None:
    empty = Recording(started_s=START_S, until_s=START_S)
    with pytest.raises(BadSettings, match="no node with GPUs of known memory"):
        history_of(empty)
    empty.node_seen(kube_node(), node().status)
    with pytest.raises(BadSettings, match="no pod with a GPU"):
        history_of(empty)


def test_events_of_the_watches_are_applied() -> None:
    now = [START_S]
    found = Recording(started_s=START_S, until_s=START_S)
    recorder = Recorder(found, lambda: now[0])
    labels = {
        "nvidia.com/gpu.count": "1",
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.sharing-strategy": "none",
        "nvidia.com/gpu.memory": "23034",
        "nvidia.com/gpu.product": "NVIDIA-L4",
    }
    labelled = Node(metadata=ObjectMeta(name="n", labels=labels), status=kube_node().status)
    recorder.deliver([NodeSeen(labelled), Relisted(Pod, (bound("a"), bound("b")), 0.0)])
    assert (found.nodes["n"].model, found.nodes["n"].gpus) == ("NVIDIA-L4", 1)
    recorder.deliver([GPUNodeSeen(node(use("a", "GPU-1", GIB)), 0.0)])
    assert (found.nodes["n"].model, found.nodes["n"].gpus) == ("L4", 2)
    assert found.pods["a"].peak_bytes == GIB
    now[0] += 10
    recorder.deliver([PodGone("a"), PodSeen(bound("c"))])
    now[0] += 10
    recorder.deliver([Relisted(Pod, (bound("c"),), 0.0), Relisted(Node, (), 0.0), NodeGone("n")])
    ends = {uid: pod.ended_s for uid, pod in found.pods.items()}
    assert ends == {"a": START_S + 10, "b": START_S, "c": None}
    assert "n" in found.nodes  # Its pods ran there.


def test_only_the_kinds_that_a_plan_needs_are_watched() -> None:
    assert [kind.name for kind in kinds()] == ["nodes", "gpunodes", "pods"]
    # The CRD may be missing.
    assert [bool(kind.other_paths) for kind in kinds()] == [False, True, False]


def test_a_snapshot_is_a_single_moment() -> None:
    body = {
        "head": {
            "format": FORMAT,
            "generated_at": stamp(START_S),
            "snapshot_generation": 1,
            "redacted": False,
            "now_s": 100.0,
            "epoch_s": START_S - 100,
        },
        "settled": {"rules": {}, "stale_after_s": 60.0, "prices": None, "namespaces": {}},
        "nodes": [
            {
                "name": "n",
                "node": msgspec.to_builtins(kube_node()),
                "gpunode": msgspec.to_builtins(node(use("b", "GPU-0", 3 * GIB))),
                "reported_at_s": 100.0,
                "manager": None,
                "backs_off": False,
                "binding": {},
                "history": [],
            }
        ],
        "pods": [
            msgspec.to_builtins(each)
            for each in (
                bound("a", START_S - 5000),
                bound("b", START_S - 50),
                bound("ended", START_S - 50, phase="Failed"),
                pod(uid="waits"),
            )
        ],
        "decisions": [],
    }
    history = history_of_snapshot(inputs_of(json.dumps(body).encode(), "s.json"))
    assert [(life.created_s, life.run_s) for life in history.lives] == [(0.0, 3600.0)] * 2
    assert {life.peak_bytes for life in history.lives} == {None, 3 * GIB}
    assert history.assumptions[0].startswith("The snapshot shows one moment")


@pytest.mark.parametrize(
    ("quantity", "thousandths"),
    [("500m", 500), ("2", 2000), (3, 3000), ("1.5", 1500), ("", None), (None, None), ("x", None)],
)
def test_cpu_is_read_in_millicores(quantity: str | int | None, thousandths: int | None) -> None:
    assert cpu_milli(quantity) == thousandths
