"""The manifests on real kubelets: installed, used, upgraded under load and taken away again.

One play for all tests here; TEST_INSTALL_NODES plays it on more nodes than two.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.controlplane import ROOT, built
from tests.debian import ip
from tests.processes import DIE_WITH_PARENT, starts_processes
from tests.waiting import until

NODES = int(os.environ.get("TEST_INSTALL_NODES", "2"))
BINARIES = (
    *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"),
    *("kubelet", "nvidia-device-plugin"),
)


@pytest.fixture(scope="module")
@starts_processes
def played(request: pytest.FixtureRequest) -> dict[str, Any]:
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():  # the first build takes minutes and prints that
        built(*BINARIES)
        ip()
    command = [sys.executable, "-m", "tests.install.play", "--nodes", str(NODES)]
    done = subprocess.run(
        [*DIE_WITH_PARENT, str(os.getpid()), *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-20_000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    typer.echo(f"{done.stderr}{NODES} nodes, during the upgrade: {found['during_upgrade']}")
    return found


#: A container of a user of its own, who is not sent a signal when the one that started it dies.
SESSION = """
import subprocess, sys
from tests.install import network
network.alone()
container = ["setpriv", "--reuid=65532", "--regid=0", "--clear-groups", "sleep", sys.argv[1]]
with subprocess.Popen(container):
    print("started", flush=True)
"""


def test_nothing_outlives_a_play_that_is_killed() -> None:
    long_s = f"{os.getpid()}.5"  # to be found by

    def left() -> list[Path]:
        found = []
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if each.read_text().split("\0")[:2] == ["sleep", long_s]:
                    found.append(each)
        return found

    command = [sys.executable, "-c", SESSION, long_s]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as session:
        assert session.stdout is not None
        assert session.stdout.readline() == "started\n"
        until(left, "the container runs")
        session.kill()
    until(lambda: not left(), "the container has ended")


def test_one_command_brings_up_schedulers_and_agents(played: dict[str, Any]) -> None:
    assert "deployment.apps/headroom-scheduler serverside-applied" in played["applied"]
    assert played["scheduler_pods"] == 2
    assert played["webhook_pods"] == played["console_pods"] == 2
    assert played["agents"] == NODES


def test_what_there_is_is_given_out_and_no_more(played: dict[str, Any]) -> None:
    assert played["room"] == played["running"] == 6 * NODES
    assert played["overdrawn"] == 0
    (message,) = played["messages"]
    reason = f"{NODES} insufficient GPU memory on any device"
    assert message.startswith(f"0/{NODES} nodes are available: {reason}")


def test_the_webhook_sends_pods_to_our_scheduler_and_rejects_mistakes(
    played: dict[str, Any],
) -> None:
    assert played["schedulers"] == ["headroom"]
    assert "headroom.gpu/vram" in played["slip"]
    assert "8G" in played["slip"]


def test_there_is_always_a_webhook_to_ask(played: dict[str, Any]) -> None:
    """A busy machine may make it slow, and clients that create pods retry."""
    assert [why for why in played["retried"] if "context deadline exceeded" not in why] == []


def test_an_upgrade_loses_no_bind(played: dict[str, Any]) -> None:
    during = played["during_upgrade"]
    assert during["failures"] == []
    assert during["created"] > 5
    assert during["versions"] == ["v2"]


def test_nothing_is_left_but_what_ran(played: dict[str, Any]) -> None:
    assert played["left"] == []
    assert played["stays"] == {"as it was": True, "annotations": ["headroom.gpu/vram"]}
    assert played["nodes as they were"] is True
