"""Runs `headroom plan record` on a real API server with real kubelets and agents, and plans with
the recording.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headroom.commands import app
from headroom.planner.recording import read_recording
from tests import forks
from tests.controlplane import STRANGER_TOKEN, TOKENS, ControlPlane
from tests.e2e.cluster import NAMESPACE, PODS, RBAC
from tests.e2e.conftest import Tell
from tests.e2e.nodes import GIB
from tests.e2e.real import RealCluster
from tests.waiting import PATIENCE_S

#: The permissions that docs/how-to/plan.md lists.
RIGHTS = [
    {"apiGroups": [""], "resources": ["pods", "nodes"], "verbs": ["list", "watch"]},
    {"apiGroups": ["headroom.gpu"], "resources": ["gpunodes"], "verbs": ["list", "watch"]},
]
ROLE = "plan-record"


@pytest.fixture
def kubeconfig(plane: ControlPlane) -> Iterator[Path]:
    """Return the kubeconfig of a user who has only these permissions."""
    metadata = {"metadata": {"name": ROLE}}
    plane.call("POST", f"{RBAC}/clusterroles", metadata | {"rules": RIGHTS})
    group = "rbac.authorization.k8s.io"
    subject = {"apiGroup": group, "kind": "User", "name": TOKENS[STRANGER_TOKEN]}
    role = {"apiGroup": group, "kind": "ClusterRole", "name": ROLE}
    binding = metadata | {"subjects": [subject], "roleRef": role}
    plane.call("POST", f"{RBAC}/clusterrolebindings", binding)
    yield plane.kubeconfig(STRANGER_TOKEN)
    for kind in ("clusterrolebindings", "clusterroles"):
        plane.call("DELETE", f"{RBAC}/{kind}/{ROLE}")


@pytest.fixture
def cluster(plane: ControlPlane, binaries: None) -> Iterator[RealCluster]:
    """A cluster of two nodes with two 24 GiB GPUs each. Four pods can share a GPU."""
    real = RealCluster(plane, 2, 2, 4)
    try:
        real.create()
        real.bring_up()
        yield real
    finally:
        real.close()


def test_lifetimes_and_peaks_are_recorded_and_used_in_a_plan(
    cluster: RealCluster, kubeconfig: Path, tmp_path: Path, tell: Tell
) -> None:
    file, log = tmp_path / "cluster.json", tmp_path / "record.log"
    sizes_gib = {"before": 4, "first": 20, "second": 6, "stays": 3}
    ended = {"before", "first"}

    def measured() -> bool:
        rows = [row for node in cluster.gpunodes() if node.status for row in node.status.pods]
        return sorted(row.used_bytes or 0 for row in rows) == sorted(
            gib * GIB for gib in sizes_gib.values()
        )

    def recorded() -> bool:
        pods = read_recording(file).pods.values() if file.exists() else ()
        return sum(pod.ended_s is not None for pod in pods) == len(ended)

    cluster.ask("before", sizes_gib["before"])
    cluster.until(lambda: cluster.pod("before")["status"]["phase"] == "Running", "it runs")
    command = ["plan", "record", str(file), "--kubeconfig", str(kubeconfig)]
    process = forks.Forked("headroom", command, log, os.environ)
    try:
        cluster.until(file.exists, "it records")
        for name in sizes_gib.keys() - {"before"}:
            cluster.ask(name, sizes_gib[name])
        cluster.until(measured, "the agents report what all pods use")
        for name in ended:
            cluster.plane.call("DELETE", f"{PODS}/{name}", {})
        cluster.until(recorded, "the file has the ends; it is written every minute")
    finally:
        process.terminate()
        status = process.wait(PATIENCE_S)
    assert status == 0, log.read_text()
    recording = read_recording(file)
    found = {pod.name.removeprefix(f"{NAMESPACE}/"): pod for pod in recording.pods.values()}
    peaks = {name: (pod.peak_bytes or 0) / GIB for name, pod in found.items()}
    assert peaks == sizes_gib
    assert {name for name, pod in found.items() if pod.ended_s is not None} == ended
    assert all(pod.created_s <= pod.started_s <= recording.until_s for pod in found.values())
    assert found["before"].created_s < recording.started_s < found["stays"].created_s + 1
    nodes = {(node.gpus, node.memory_bytes) for node in recording.nodes.values()}
    assert (recording.nodes.keys(), nodes) == (set(cluster.names), {(2, 24 * GIB)})
    assert recording.gaps == []

    few = [
        "--device-choice",
        "steered",
        "--replicas",
        "4",
        "--seeds",
        "1",
        "--processes",
        "1",
        "--json",
    ]
    answer = CliRunner().invoke(app, ["plan", "--recording", str(file), *few])
    assert answer.exit_code == 0, answer.stderr
    data = json.loads(answer.stdout)
    assert (data["pods"], data["gpus"], data["vram"]) == (4, 4, "peaks + 10 %")
    # The first second counts completely, because a creation time has no fractions of a second.
    assert any("began before the recording" in each for each in data["assumptions"])
    span_s = recording.until_s - recording.started_s
    tell(f"{span_s:.0f} s recorded, {file.stat().st_size} bytes: {data['sentences'][:3]}")
