"""Checks that errors of the command line show the mistake, its position, and the fix."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.controlplane import ROOT
from tests.forks import run

pytestmark = pytest.mark.slow

FLEET = "nodes: [{name: a, gpus: 1, memory: 1Gi}]"


def headroom(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run("headroom", *arguments, env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **env})


def test_headroom_without_a_command_lists_the_commands() -> None:
    shown = headroom()
    assert "serve" in shown.stdout + shown.stderr
    assert "console" in shown.stdout + shown.stderr


def test_an_invalid_fleet_file_is_reported_in_one_line_without_a_stack_trace(
    tmp_path: Path,
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("nodes: []")
    rejected = headroom("serve", "--embedded", str(path))
    assert rejected.returncode == 2
    (line,) = rejected.stderr.splitlines()
    assert line.startswith(f"headroom: {path}: nodes: ")
    assert "Example: " in line


def test_without_a_cluster_the_error_has_a_suggestion() -> None:
    rejected = headroom("serve")
    assert rejected.returncode == 2
    (line,) = rejected.stderr.splitlines()
    assert line.startswith("headroom: no cluster is configured: ")
    assert "headroom serve --embedded FLEET.yaml" in line


def test_the_embedded_server_rejects_other_hosts_than_loopback(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    rejected = headroom("serve", "--embedded", str(path), "--debug-host", "0.0.0.0")
    assert rejected.returncode == 2
    (line,) = rejected.stderr.splitlines()
    assert line.startswith("headroom: host is 0.0.0.0, but ")
    assert "Example: host: 127.0.0.1" in line


def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        rejected = headroom("serve", "--embedded", str(path), "--verbs-port", port)
    assert rejected.returncode == 1
    (line,) = rejected.stderr.splitlines()
    at = f"127.0.0.1:{port}"
    assert line == f"headroom: cannot listen on {at} (setting verbs_port): Address already in use"


def test_the_doctor_checks_a_fleet_file(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "nodes: [{name: a, count: 2, gpus: 2, memory: 24Gi, sharing: time-slicing, replicas: 4},"
        " {name: b, gpus: 1, memory: 24Gi, annotations: {headroom.gpu/reserve: lots}}]"
    )
    reported = headroom("doctor", "--fleet", str(path))
    warning, advice = reported.stdout.splitlines()
    assert warning.startswith("warning: b: takes no pods: annotation headroom.gpu/reserve")
    assert advice.startswith("advice: a-0000, a-0001: a container may request several replicas")
    assert reported.returncode == 1
    path.write_text(FLEET)
    reported = headroom("doctor", "--fleet", str(path))
    assert (reported.stdout, reported.returncode) == ("", 0)
    assert reported.stderr == "headroom: no findings\n"
    reported = headroom("doctor", "--plugin-config", "--fleet", str(path))
    assert (reported.stdout, reported.returncode) == ("", 0)
    assert reported.stderr.startswith("headroom: no node needs another number of replicas")


def test_the_doctor_reports_unreadable_sources(tmp_path: Path) -> None:
    for arguments in ([], ["--fleet", str(tmp_path / "none.yaml")]):
        reported = headroom("doctor", *arguments)
        assert reported.returncode == 2
        (line,) = reported.stderr.splitlines()
        assert line.startswith("headroom: ")
    assert "cannot be read: No such file" in line


def test_an_unknown_log_level_is_rejected_with_the_valid_ones() -> None:
    rejected = headroom("serve", "--log-level", "loud")
    assert rejected.returncode == 2
    assert all(level in rejected.stderr for level in ("loud", "debug", "info", "warning", "error"))


def test_the_demo_does_not_import_the_kubernetes_client() -> None:
    """The environment of the demo does not contain the package ``kubernetes``."""
    hidden = (
        "import sys; sys.modules['kubernetes'] = None; import headroom.commands, benchmarks.demo"
    )
    done = subprocess.run(
        [sys.executable, "-c", hidden], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
