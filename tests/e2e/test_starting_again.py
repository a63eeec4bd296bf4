"""Runs engines that start alone on one GPU. A real kubelet restarts all of them at the same time.

Each engine allocates its memory as soon as it runs, so its use settles after ``SETTLED_AFTER_S``.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent.peaks import SETTLED_AFTER_S
from tests.controlplane import SCHEDULER_NAME, ControlPlane
from tests.driver import GIB
from tests.e2e.cluster import PODS
from tests.e2e.gated import GATE_CONTAINER, pod_of
from tests.e2e.real import RealCluster
from tests.kubelet.cri_objects import Container
from tests.kubelet.node import Node

pytestmark = pytest.mark.since("1.37")

WAITS = "another pod that starts alone is starting on the same device"
#: A container that exits with this status restarts all containers of its pod.
RESTART_ALL = 42
NAMES = ("first", "second")


class Engines:
    """Two engines on a node. According to their reservations, both have finished starting."""

    def __init__(self, cluster: RealCluster, flags: Sequence[str], state: Path) -> None:
        self.cluster = cluster
        self.state = state
        self._flags = flags
        (self.name,) = cluster.names

    @property
    def machine(self) -> Node:
        return self.cluster.machines[self.name]

    def create(self) -> None:
        for name in NAMES:
            pod: dict[str, Any] = pod_of(name, 4)
            pod["metadata"]["annotations"]["headroom.gpu/startup"] = "alone"
            pod["spec"] |= {"schedulerName": SCHEDULER_NAME, "initContainers": [GATE_CONTAINER]}
            pod["spec"]["containers"][0] |= {
                "restartPolicy": "Always",
                "restartPolicyRules": [
                    {
                        "action": "RestartAllContainers",
                        "exitCodes": {"operator": "In", "values": [RESTART_ALL]},
                    }
                ],
            }
            self.cluster.plane.call("POST", PODS, pod)
            self.cluster.asked_bytes[name] = 4 * GIB
        self.cluster.until(lambda: self.phases() == ["running"] * 2, "both starts have ended")

    def phases(self) -> list[str]:
        reservations = self.cluster.gpunode(self.name).spec.reservations
        return [each.phase for each in reservations.values()]

    def newest(self, pod: str, container: str) -> Container | None:
        """Return the newest container with this name. Return None if ``RestartAllContainers`` has
        removed all containers.
        """
        with self.machine.runtime.lock:
            found = [*self.machine.runtime.containers.values()]
        of_pod = [each for each in found if (each.pod, each.name) == (pod, container)]
        return max(of_pod, key=lambda each: each.created_ns, default=None)

    def start_agent(self) -> None:
        kubeconfig = self.cluster.plane.kubeconfig("agent-of-the-tests")
        self.machine.start_agent(kubeconfig, *self._flags)

    def running(self) -> list[Container]:
        """Return the running engines in the order of their starts."""
        found = [self.newest(name, "main") for name in NAMES]
        return sorted((e for e in found if e and e.pid), key=lambda each: each.started_ns)

    def run_again(self, before: Sequence[Container]) -> list[Container]:
        """Wait until both engines run in new containers."""
        self.cluster.until(
            lambda: len({*self.running()} - {*before}) == len(NAMES), "both engines run again"
        )
        return self.running()

    def waits(self, name: str) -> bool:
        """Return whether the gate has printed that it waits for the start of another pod."""
        gate = self.newest(name, "headroom-gate")
        return gate is not None and WAITS in gate.output


@pytest.fixture
def engines(
    plane: ControlPlane, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Engines]:
    """The engines. The parameter of the fixture is the kubelet's version, by default the newest."""
    kubelet = getattr(request, "param", "kubelet")
    flags = [f"--state={tmp_path}/run/state.json"]
    real = RealCluster(plane, 1, gpus=1, replicas=4, agent_flags=flags, kubelet=kubelet)
    try:
        real.create()
        gated = {"metadata": {"annotations": {"headroom.gpu/device-choice": "gated"}}}
        plane.call("PATCH", f"/api/v1/nodes/{real.names[0]}", gated)
        real.bring_up()
        made = Engines(real, flags, tmp_path / "run")
        made.create()
        yield made
    finally:
        real.close()


def assert_started_one_after_the_other(engines: Engines, started: Sequence[Container]) -> None:
    earlier, later = started
    assert later.started_ns - earlier.started_ns >= SETTLED_AFTER_S * 1e9
    assert engines.waits(later.pod)
    assert not engines.waits(earlier.pod)
    assert engines.phases() == ["running"] * 2


@pytest.mark.parametrize("engines", ["kubelet", "kubelet-1.36"], indirect=True)
def test_engines_that_restart_all_their_containers_start_one_after_the_other(
    engines: Engines,
) -> None:
    """The agent also restarts at this time."""
    before = engines.running()
    for each in before:
        engines.machine.runtime.exit(each, RESTART_ALL)
    engines.cluster.until(lambda: any(map(engines.waits, NAMES)), "one engine waits at its gate")
    engines.machine.kill("agent")
    engines.start_agent()
    assert_started_one_after_the_other(engines, engines.run_again(before))


def test_engines_start_one_after_the_other_after_a_reboot(engines: Engines) -> None:
    """The plugin registers before the kubelet receives the pods, because otherwise the kubelet
    would reject them.
    """
    before = engines.running()
    engines.machine.kill("agent")
    with engines.machine.kubelet_restarts():
        engines.machine.runtime.reboot()
        shutil.rmtree(engines.state)  # /run is in memory, so a reboot empties it.
    engines.start_agent()
    assert_started_one_after_the_other(engines, engines.run_again(before))
