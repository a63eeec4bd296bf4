"""Tests pods whose init, sidecar or ephemeral containers use GPUs, on a real kubelet.

PodResources does not list ordinary init containers, but the kubelet keeps their devices as long as
the pod exists.
"""

import time
from typing import Any

import pytest

from agent.probes.kubelet import SETTLED_AFTER_S
from headroom.contract.gpunode import GPUNodeStatus
from tests.kubelet.conftest import StartNode
from tests.kubelet.node import PODS, Node
from tests.kubelet.node_objects import gpu_container, gpu_pod
from tests.kubelet.probed_node import Agent, StartAgent, start_agent, states
from tests.kubelet.steered_node import StartSteered, start_steered

__all__ = ["start_agent", "start_steered"]


def _allocated(status: GPUNodeStatus) -> int:
    return sum(device.replicas.allocated for device in status.devices)


def _held_by(node: Node, name: str) -> set[tuple[str, str]]:
    """Return the containers and replicas of a pod that the device manager has recorded."""
    uid = node.uid(name)
    return {
        (entry["ContainerName"], replica)
        for entry in node.checkpoint()["PodDeviceEntries"] or ()
        if entry["PodUID"] == uid
        for replicas in entry["DeviceIDs"].values()
        for replica in replicas
    }


def _rows(agent: Agent, uid: str) -> set[tuple[str, str]]:
    return {(row.container, row.replica) for row in agent.sample().pods if row.uid == uid}


def _without_gpu(name: str) -> dict[str, Any]:
    return {"name": name, "image": "any"}


def _pod(name: str, init: list[dict[str, Any]], main: dict[str, Any]) -> dict[str, Any]:
    return gpu_pod(name, initContainers=init, containers=[main])


_INIT = gpu_container("init", "exit", "0")
_SIDECAR = gpu_container("sidecar") | {"restartPolicy": "Always"}


@pytest.mark.parametrize(
    ("init", "main", "containers", "replicas"),
    [
        pytest.param([_INIT], _without_gpu("main"), {"init"}, 1, id="init alone"),
        pytest.param([_INIT], gpu_container("main"), {"init", "main"}, 1, id="init and main"),
        pytest.param([_SIDECAR], _without_gpu("main"), {"sidecar"}, 1, id="sidecar alone"),
        pytest.param(
            [_SIDECAR, _INIT], gpu_container("main"), {"sidecar", "init", "main"}, 2, id="all"
        ),
    ],
)
def test_a_pod_holds_the_replicas_of_all_its_containers_until_it_ends(
    start_node: StartNode,
    start_agent: StartAgent,
    init: list[dict[str, Any]],
    main: dict[str, Any],
    containers: set[str],
    replicas: int,
) -> None:
    node = start_node(gpus=2, replicas=2)
    agent = start_agent(node, settled_after_s=0.0)
    node.bind(_pod("p", init, main))
    node.wait(lambda: "main" in node.runtime.running("p"), "a pod that runs")
    uid, held = node.uid("p"), _held_by(node, "p")
    assert {container for container, _ in held} == containers
    assert len({replica for _, replica in held}) == replicas
    assert _rows(agent, uid) == held
    status = agent.sample()
    assert _allocated(status) == replicas
    assert states(status)["podresources"] == "ok", status.sources
    # The kubelet also has exactly the other replicas free.
    others = [f"other-{number}" for number in range(4 - replicas)]
    for other in others:
        node.admit(gpu_pod(other))
    assert _rows(agent, uid) == held
    assert _allocated(agent.sample()) == 4
    # The kubelet does not write the checkpoint when a pod ends.
    node.delete("p")
    node.wait(lambda: node.is_gone("p"), "a pod that is gone")
    node.wait(lambda: _allocated(agent.sample()) == len(others), "its replicas are free")
    assert _rows(agent, uid) == set()


def test_an_agent_that_starts_later_reports_a_pod_with_a_gpu_in_its_init_container(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    node = start_node(gpus=1, replicas=2)
    node.bind(_pod("ended", [_INIT], gpu_container("main", "exit", "0")))
    node.wait(lambda: node.status("ended")["phase"] == "Succeeded", "a pod that ended")
    # Run another pod, because kubelet 1.31 lists an ended pod until it admits another pod.
    node.bind(_pod("p", [_INIT], _without_gpu("main")))
    node.wait(lambda: "main" in node.runtime.running("p"), "a pod that runs")
    agent = start_agent(node, settled_after_s=1.0)
    node.wait(lambda: _allocated(agent.sample()) == 1, "the replica of the pod that runs")
    # A restarted kubelet without its plugin would reject the pod, because its init container has
    # ended.
    with node.kubelet_restarts():
        pass
    node.wait(lambda: states(agent.sample())["podresources"] == "ok", "a kubelet with its pods")
    assert _rows(agent, node.uid("p")) == _held_by(node, "p")
    node.wait(lambda: _allocated(agent.sample()) == 1, "the plugin has registered again")


def test_a_gate_opens_if_only_an_init_container_uses_a_gpu(start_steered: StartSteered) -> None:
    """The gate's answer changes from "not yet" because the agent reports the replica of the pod."""
    steered = start_steered(gpus=1, replicas=2, flags=("--device-choice=predicted",))
    socket = steered.node.root / "pod-resources/kubelet.sock"
    # Wait, because unlisted pods count as running for some time.
    steered.node.wait(
        lambda: time.time() - socket.stat().st_ctime > SETTLED_AFTER_S, "a kubelet that has settled"
    )
    uid = {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
    gate = {"name": "gate", "image": "any", "command": ["python", "-I", "-m", "agent.gate_client"]}
    steered.reservation(_pod("p", [gate | {"env": [uid]}, _INIT], _without_gpu("main")), "GPU-0", 4)
    steered.bind("p")
    running = steered.node.runtime.running
    steered.node.wait(lambda: "main" in running("p"), "a pod whose gate has opened")


def test_an_ephemeral_container_holds_no_replica(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    """An ephemeral container uses the GPUs of its pod, because the API server accepts no resources
    for it.
    """
    node = start_node(gpus=1, replicas=2)
    agent = start_agent(node, settled_after_s=0.0)
    node.run(gpu_pod("p"))
    uid, held = node.uid("p"), _held_by(node, "p")
    debug = {"name": "debug", "image": "any", "targetContainerName": "main"}
    node.plane.call(
        "PATCH",
        f"{PODS}/p/ephemeralcontainers",
        {"spec": {"ephemeralContainers": [debug]}},
        "application/strategic-merge-patch+json",
    )
    node.wait(lambda: "debug" in node.runtime.running("p"), "the ephemeral container runs")
    main = node.runtime.running("p")["main"]
    (device,) = main.devices
    node.driver.use(node.runtime.running("p")["debug"].pid, {device: 3 << 30})
    status = agent.sample()
    assert _rows(agent, uid) == held
    assert _allocated(status) == 1
    assert [(row.container, row.used_bytes) for row in status.pods] == [("main", 3 << 30)]
