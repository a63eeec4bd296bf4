"""Installs the package of a release on a node with real containers, and checks what the kernel and
the kubelet report about them.

`make containers` runs this module. `make test` does not, because it takes minutes.
"""

import os
from typing import Any

import pytest

from tests.controlplane import built
from tests.debian import ip
from tests.install.playing import result_of
from tests.install.test_install import BINARIES
from tests.processes import starts_processes

MIB = 1 << 20
#: The capability set that contains only SYS_PTRACE, in the format of /proc.
SYS_PTRACE = f"{1 << 19:016x}"
NONE = f"{0:016x}"
HEADROOM = "/opt/headroom/bin/python /opt/headroom/bin/headroom"
CONFIG = "--config /etc/headroom/config"


@pytest.fixture(scope="module")
@starts_processes
def played(request: pytest.FixtureRequest) -> dict[str, Any]:
    if os.geteuid() != 0:
        pytest.fail("make containers needs root: it mounts file systems and starts containers")
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        built(*BINARIES)  # the first build takes minutes and prints progress
        ip()
    return result_of("tests.install.packaged")


@pytest.fixture
def containers(played: dict[str, Any]) -> dict[str, Any]:
    return dict(played["containers"])


def test_each_container_is_one_process_with_the_arguments_of_its_manifest(
    containers: dict[str, Any],
) -> None:
    assert {name: seen["processes"] for name, seen in containers.items()} == {
        "extender/extender": [f"{HEADROOM} extender {CONFIG}"],
        "extender/kube-scheduler": [
            "kube-scheduler --config=/etc/headroom/scheduler/kube-scheduler.yaml "
            "--feature-gates=SchedulerPopFromBackoffQ=false"
        ],
        "webhook/webhook": [f"{HEADROOM} webhook {CONFIG}"],
        "console/console": [f"{HEADROOM} console {CONFIG}"],
        "agent/agent": [f"{HEADROOM} agent"],
    }
    assert {seen["restarts"] for seen in containers.values()} == {0}


def test_only_the_agent_has_a_capability_and_is_root(containers: dict[str, Any]) -> None:
    agent = containers.pop("agent/agent")
    assert set(agent["capabilities"].values()) == {SYS_PTRACE}
    assert (agent["user"], agent["group"]) == ("0", "0")
    for name, seen in containers.items():
        assert set(seen["capabilities"].values()) == {NONE}, name
        assert (seen["user"], seen["group"]) == ("65532", "65532"), name
        assert "65532" in seen["groups"], (
            name
        )  # With the fsGroup, the user can read the private key.


def test_no_container_can_gain_privileges(containers: dict[str, Any]) -> None:
    assert {seen["no_new_privs"] for seen in containers.values()} == {"1"}
    # 2 means that a seccomp filter is active.
    assert {seen["seccomp"] for seen in containers.values()} == {"2"}


def test_only_mounts_of_the_kubelet_and_the_manifest_are_writable(
    played: dict[str, Any], containers: dict[str, Any]
) -> None:
    """The kubelet mounts ``/etc/hosts`` and the termination log into every container. With cgroup
    v1, runc mounts an empty tmpfs that belongs to root at ``/sys/fs/cgroup``.
    """
    usual = {"/dev", "/dev/mqueue", "/dev/pts", "/dev/shm", "/dev/termination-log", "/etc/hosts"}
    writable = {name: set(seen["writable"]) - usual for name, seen in containers.items()}
    agent = writable.pop("agent/agent")
    if not played["recursive read-only mounts"]:  # containerd older than 2.0
        agent = {each for each in agent if not each.startswith("/sys/fs/cgroup/")}
    assert agent == {"/run/headroom"}
    assert played["files of the agent"] == ["agent.json", "agent.lives.json"]
    for name, paths in writable.items():
        assert paths <= {"/sys/fs/cgroup"}, name


def test_memory_stays_below_the_limit_in_the_manifest(containers: dict[str, Any]) -> None:
    assert {name: seen["limit_bytes"] for name, seen in containers.items()} == {
        "extender/extender": 768 * MIB,
        "extender/kube-scheduler": None,
        "webhook/webhook": 512 * MIB,
        "console/console": 896 * MIB,
        "agent/agent": 256 * MIB,
    }
    del containers["extender/kube-scheduler"]
    for name, seen in containers.items():
        assert seen["most_bytes"] < seen["limit_bytes"] / 2, name


def test_pods_are_scheduled_and_the_agent_attributes_the_memory_of_their_processes(
    played: dict[str, Any],
) -> None:
    assert played["schedulers"] == ["headroom"]
    assert played["pods_by_device"] == [3, 3]
    (message,) = played["messages"]
    assert message.startswith("0/1 nodes are available: 1 insufficient GPU memory on any device")
    assert played["attributed"] == [7 << 30] * 6


def test_pods_end_on_sigterm_within_their_grace_period(played: dict[str, Any]) -> None:
    """An exit code of 137 would mean SIGKILL. After SIGTERM, the webhook still serves for 5 s,
    because clients learn late that the endpoint is gone.
    """
    ends = played["ends"]
    assert {component: seen["codes"] for component, seen in ends.items()} == {
        "extender": [0, 0],
        "webhook": [0],
        "console": [0],
        "agent": [0],
    }
    assert max(seen["took_s"] for seen in ends.values()) < 15.0


def test_uninstalling_leaves_only_the_running_pods_of_users(played: dict[str, Any]) -> None:
    assert played["left"] == []
    assert played["stays"] == {"as it was": True, "annotations": ["headroom.gpu/vram"]}
    assert played["nodes as they were"] is True
