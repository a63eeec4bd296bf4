"""A real API server listed once."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from extender.settings import Settings
from extender.wiring.listing import list_cluster
from tests.controlplane import ROOT, ControlPlane
from tests.scripted import Exchange, scripted_server

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


def test_what_does_not_even_say_its_name_is_left_out(tmp_path: Path) -> None:
    def nameless(exchange: Exchange) -> None:
        items = [{"spec": 5}, {"metadata": 5}, "odd", {"metadata": {"name": "n", "uid": "u"}}]
        exchange.reply(200, {"metadata": {}, "items": items})

    with scripted_server(*[nameless] * 6) as server:
        clusters = [{"name": "c", "cluster": {"server": server.configuration().host}}]
        contexts = [{"name": "c", "context": {"cluster": "c", "user": "u"}}]
        file = tmp_path / "kubeconfig"
        users = [{"name": "u", "user": {}}]
        told = {"clusters": clusters, "contexts": contexts, "users": users, "current-context": "c"}
        file.write_text(json.dumps({"kind": "Config", "apiVersion": "v1", **told}))
        listed = list_cluster(Settings(), str(file))
    assert {obj.metadata.name for kind in listed for obj in kind.objects} == {"n"}
