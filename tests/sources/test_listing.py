"""A real API server listed once."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.controlplane import ROOT, ControlPlane

NODES = "/api/v1/nodes"


@pytest.fixture
def node(plane: ControlPlane) -> Iterator[str]:
    name = "looked-at-by-the-doctor"
    plane.call("POST", NODES, {"metadata": {"name": name}})
    status = {"status": {"allocatable": {"nvidia.com/gpu": "4"}}}
    plane.call("PATCH", f"{NODES}/{name}/status", status, "application/merge-patch+json")
    yield name
    plane.call("DELETE", f"{NODES}/{name}")


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "extender", "doctor", *arguments],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_doctor_lists_a_cluster(plane: ControlPlane, node: str) -> None:
    told = doctor("--kubeconfig", str(plane.kubeconfig()))
    (line,) = [line for line in told.stdout.splitlines() if node in line]
    assert line.startswith("warning: ")
    assert "no GPU report from the node" in line
    assert told.returncode == 1


def test_without_the_rights_it_says_which(plane: ControlPlane) -> None:
    told = doctor("--kubeconfig", str(plane.kubeconfig("nobody-of-the-tests")))
    assert told.returncode == 2
    (line,) = told.stderr.splitlines()
    assert line.startswith("headroom: the cluster cannot be looked at: GET /api/v1/nodes: 401")
    assert "a kubeconfig that may list nodes" in line
