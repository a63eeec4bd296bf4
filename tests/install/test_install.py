"""Installs the packaged chart on real kubelets, upgrades it and rolls it back under load, and
removes it.

All tests in this module share one run of ``tests.install.play``. TEST_INSTALL_NODES sets its number
of nodes (default 2).
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from release.source import version_of
from tests.controlplane import ROOT, built
from tests.debian import ip
from tests.install.playing import result_of
from tests.processes import starts_processes
from tests.waiting import until

NODES = int(os.environ.get("TEST_INSTALL_NODES", "2"))
BINARIES = (
    *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"),
    *("kubelet", "nvidia-device-plugin", "helm"),
)


@pytest.fixture(scope="module")
@starts_processes
def played(request: pytest.FixtureRequest) -> dict[str, Any]:
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        built(*BINARIES)  # Show the progress of the build.
        ip()
    return result_of("tests.install.play", "--nodes", str(NODES))


#: A program that starts a process with another user, which the kernel does not kill when its parent
#: dies.
SESSION = """
import subprocess, sys
from tests.install import network
network.alone()
container = ["setpriv", "--reuid=65532", "--regid=0", "--clear-groups", "sleep", sys.argv[1]]
with subprocess.Popen(container):
    print("started", flush=True)
"""


def test_no_container_survives_a_killed_play() -> None:
    long_s = f"{os.getpid()}.5"  # a unique number, by which the process is found

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


def test_the_package_installs_all_components(played: dict[str, Any]) -> None:
    assert played["package"] == f"headroom-{version_of(ROOT)}.tgz"
    parts = ("extender", "webhook", "console", "agent")
    assert [played[f"{part}_pods"] for part in parts] == [2, 2, 2, NODES]


def test_a_hanging_extender_becomes_unready_and_is_restarted(
    played: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    """The kubelet restarts the extender because of its liveness probe. The durations are only
    recorded, because they depend on the machine.
    """
    frozen = played["frozen"]
    record_property(
        "measured",
        f"extender that hangs: its pod is not ready after {frozen['unready']} s, started again "
        f"after {frozen['restarted']} s, ready after {frozen['ready']} s",
    )
    assert list(frozen) == ["unready", "restarted", "ready"]


def test_pods_can_reserve_all_memory_but_not_more(played: dict[str, Any]) -> None:
    assert played["room"] == played["running"] == 6 * NODES
    (message,) = played["messages"]
    reason = f"{NODES} insufficient GPU memory on any device"
    assert message.startswith(f"0/{NODES} nodes are available: {reason}")


def test_the_webhook_sets_our_scheduler_and_rejects_mistakes(
    played: dict[str, Any],
) -> None:
    assert played["schedulers"] == ["headroom"]
    assert "headroom.gpu/vram" in played["slip"]
    assert "8G" in played["slip"]


@pytest.mark.parametrize("change", ["upgrade", "rollback"])
def test_a_webhook_answers_throughout_upgrade_and_rollback(
    played: dict[str, Any], change: str
) -> None:
    """Timeouts are accepted, because on a busy machine the webhook can be slow, and clients
    retry.
    """
    retried = played[change]["retried"]
    assert [why for why in retried if "context deadline exceeded" not in why] == []


@pytest.mark.parametrize("change", ["upgrade", "rollback"])
def test_upgrade_and_rollback_keep_all_pods_and_reservations(
    played: dict[str, Any], change: str
) -> None:
    """One pod on each GPU always runs, and the same number of pods wait that can never fit. If a
    reservation were missing for a moment, a waiting pod would be bound.
    """
    seen = played[change]
    assert seen["faults"] == []
    assert seen["rounds"] > 20
    assert (seen["running"], seen["waiting"]) == (2 * NODES, 2 * NODES)
    assert seen["overcommitted"] == []


@pytest.mark.parametrize("change", ["upgrade", "rollback"])
def test_pods_are_bound_throughout_upgrade_and_rollback(
    played: dict[str, Any], change: str, record_property: Callable[[str, object], None]
) -> None:
    """The waiting times are only recorded, because they depend on the machine."""
    seen = played[change]
    record_property(
        "measured",
        f"{change} of {NODES} nodes in {seen['took_s']} s; {seen['bound']} pods bound meanwhile;"
        f" longest wait {seen['longest_wait_s']} s ({seen['longest_wait_before_s']} s before)",
    )
    assert seen["failures"] == []
    assert seen["bound"] >= 3


def test_the_crd_changes_with_the_version(played: dict[str, Any]) -> None:
    """Extenders of the old version keep the unknown field when they write. The old CRD drops the
    field.
    """
    upgraded, rolled_back = played["upgrade"], played["rollback"]
    major, minor, _ = version_of(ROOT).split(".")
    assert upgraded["tags"] == [f"{major}.{int(minor) + 1}.0"]
    assert (upgraded["field"], upgraded["column"]) == (True, True)
    assert upgraded["values"] == ["written"]
    assert rolled_back["tags"] == [version_of(ROOT)]
    assert (rolled_back["field"], rolled_back["column"]) == (False, False)
    assert rolled_back["values"] == [""]


def test_uninstalling_leaves_only_user_pods_and_nodes(played: dict[str, Any]) -> None:
    assert played["left"] == []
    assert played["stays"] == {"as it was": True, "annotations": ["headroom.gpu/vram"]}
    assert played["nodes as they were"] is True
