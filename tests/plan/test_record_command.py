"""Runs `headroom plan record` against a scripted API server."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from headroom.commands import app
from headroom.planner.recording import history_of, read_recording
from tests import forks
from tests.scripted import Exchange, scripted_server
from tests.waiting import PATIENCE_S, until

GPU = "nvidia.com/gpu"


def gpu_pod(name: str, gpus: str = "1") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "ml", "uid": name, "resourceVersion": "1"},
        "spec": {
            "nodeName": "n",
            "containers": [{"name": "main", "resources": {"limits": {GPU: gpus}}}],
        },
        "status": {"phase": "Running"},
    }


NODE = {
    "metadata": {
        "name": "n",
        "uid": "n",
        "resourceVersion": "1",
        "labels": {
            "nvidia.com/gpu.count": "1",
            "nvidia.com/gpu.replicas": "1",
            "nvidia.com/gpu.sharing-strategy": "none",
            "nvidia.com/gpu.memory": "23034",
            "nvidia.com/gpu.product": "NVIDIA-L4",
        },
    },
    "status": {"allocatable": {GPU: "1", "cpu": "8"}},
}


def write_kubeconfig(file: Path, port: int) -> None:
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    context = {"name": "c", "context": {"cluster": "c", "user": ""}}
    file.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [cluster],
                "contexts": [context],
                "current-context": "c",
            }
        )
    )


@pytest.mark.slow
def test_a_recording_is_continued_and_reports_the_gap(tmp_path: Path) -> None:
    listed = [gpu_pod("a"), gpu_pod("b")]
    watched = threading.Event()

    def route(exchange: Exchange) -> None:
        if exchange.path.endswith("/gpunodes"):
            exchange.reply(404, {"code": 404, "message": "not found"})
        elif "watch" not in exchange.query:
            items = listed if exchange.path.endswith("/pods") else [NODE]
            exchange.reply(200, {"metadata": {"resourceVersion": "5"}, "items": items})
        else:
            exchange.begin_stream()
            if exchange.path.endswith("/pods"):
                exchange.chunk({"type": "DELETED", "object": listed[0]})
                watched.set()
            exchange.hang()

    file, kubeconfig = tmp_path / "cluster.json", tmp_path / "kubeconfig"
    with scripted_server(*[route] * 60) as server:
        write_kubeconfig(kubeconfig, server.port)
        command = ["plan", "record", str(file), "--kubeconfig", str(kubeconfig)]
        log = tmp_path / "record.log"

        def recorded(*more: str) -> None:
            watched.clear()
            process = forks.Forked("headroom", [*command, *more], log, os.environ)
            try:
                assert watched.wait(PATIENCE_S)
                until(file.exists, "the file is written")
                other = forks.run("headroom", *command, env=os.environ, timeout_s=300.0)
                assert other.returncode == 2
                assert "another process records to it" in other.stderr
            finally:
                process.terminate()
                status = process.wait(PATIENCE_S)
            assert status == 0, log.read_text()

        recorded()
        assert f" on 1 node to {file} until Ctrl-C" in log.read_text()
        first = read_recording(file)
        assert {uid: pod.ended_s is None for uid, pod in first.pods.items()} == {
            "a": False,
            "b": True,
        }
        assert first.nodes["n"].cpu_milli == 8000
        assert first.gaps == []

        # An hour later, pod b is deleted and pod c is new.
        body = json.loads(file.read_text())
        for key in ("started_s", "until_s"):
            body[key] -= 3600
        for each in body["pods"].values():
            each["created_s"] -= 3600
            each["started_s"] -= 3600
        file.write_text(json.dumps(body))
        listed[:] = [gpu_pod("c")]
        recorded()
    second = read_recording(file)
    (gap,) = second.gaps
    assert 3590 < gap.until_s - gap.from_s < 3700
    assert second.pods["b"].ended_s == gap.from_s
    assert second.pods["c"].ended_s is not None
    history = history_of(second)
    assert len(history.lives) == 3
    assert "Nothing was recorded in 1 gap, 1.0 h in total" in " ".join(history.assumptions)


def test_a_recording_in_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "cluster.json"
    found = CliRunner().invoke(app, ["plan", "record", str(file)])
    assert found.exit_code == 2
    assert found.stderr == (
        f"headroom: {file} cannot be written: No such file or directory. Example: headroom plan "
        "record cluster.json\n"
    )


@pytest.mark.slow
def test_a_failed_call_is_reported_in_a_sentence(tmp_path: Path) -> None:
    granted = threading.Event()

    def route(exchange: Exchange) -> None:
        if "watch" in exchange.query:
            exchange.begin_stream()
            exchange.hang()
        elif exchange.path.endswith("/pods") and not granted.is_set():
            exchange.reply(403, {"code": 403, "message": "pods is forbidden"})
        else:
            exchange.reply(200, {"metadata": {"resourceVersion": "5"}, "items": []})

    kubeconfig, log = tmp_path / "kubeconfig", tmp_path / "record.log"
    with scripted_server(*[route] * 60) as server:
        write_kubeconfig(kubeconfig, server.port)
        command = ["plan", "record", str(tmp_path / "c.json"), "--kubeconfig", str(kubeconfig)]
        log.touch()
        process = forks.Forked("headroom", command, log, os.environ)
        try:
            until(lambda: "forbidden" in log.read_text(), "the failure is reported")
            granted.set()
            until(lambda: "records" in log.read_text(), "it records")
        finally:
            process.terminate()
            process.wait(PATIENCE_S)
    failed, records = log.read_text().splitlines()
    assert failed == (
        "headroom: the recording is incomplete while this fails: "
        "GET /api/v1/pods: 403 pods is forbidden"
    )
    assert records.startswith("headroom: records 0 pods on 0 nodes to ")
