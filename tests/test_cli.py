"""What the command line says when something is wrong: what, where, and what to do."""

import socket
import subprocess
import sys
from pathlib import Path

from tests.serving import ROOT

FLEET = "nodes: [{name: a, gpus: 1, memory: 1Gi}]"


def headroom(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "extender", *arguments],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_no_command_shows_the_commands() -> None:
    shown = headroom()
    assert "serve" in shown.stdout + shown.stderr
    assert "demo" in shown.stdout + shown.stderr


def test_bad_fleet_file_is_one_line_without_a_stack_trace(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("nodes: []")
    refused = headroom("serve", "--embedded", str(path))
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"headroom: {path}: nodes: ")
    assert "right is, for example" in line


def test_without_a_cluster_it_says_what_to_do() -> None:
    refused = headroom("serve")
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith("headroom: no cluster is configured: ")
    assert "headroom serve --embedded FLEET.yaml" in line


def test_taken_port_is_named(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = headroom("serve", "--embedded", str(path), "--verbs-port", port)
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert line.startswith("headroom: cannot listen on ")
    assert port in line
