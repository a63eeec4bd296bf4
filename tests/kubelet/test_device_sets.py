"""Tests with a real kubelet and device plugin that a container gets several different GPUs.

The tests act as the extender, which writes reservations into the GPUNode and binds pods.
"""

from typing import Any

import pytest

from tests.kubelet.node_objects import RESOURCE, gpu_container, gpu_pod
from tests.kubelet.steered_node import StartSteered, SteeredNode, start_steered

__all__ = ["start_steered"]

GPUS = [f"GPU-{n}" for n in range(4)]
#: Policies of the kubelet's topology manager.
POLICIES = ["none", "best-effort", "restricted", "single-numa-node"]


def wide_pod(name: str, gpus: int, **spec: Any) -> dict[str, Any]:
    return gpu_pod(name, containers=[gpu_container("main", gpus=gpus)], **spec)


def devices(steered: SteeredNode, name: str) -> dict[str, list[str]]:
    """Return the devices that the kubelet allocated to each container."""
    found: dict[str, list[str]] = {}
    for held in steered.node.held(name):
        found.setdefault(held.container, []).append(held.device)
    return {container: sorted(some) for container, some in found.items()}


def admitted(
    steered: SteeredNode, pod: dict[str, Any], where: list[str], gib: int = 4, count: int = 0
) -> dict[str, list[str]]:
    """Reserve devices for the pod, bind it, and wait until a report shows it. Return its
    devices.
    """
    name = pod["metadata"]["name"]
    steered.reservation(pod, where, gib, count)
    steered.bind(name)
    steered.node.wait(lambda: steered.node.held(name), f"a pod {name} that was admitted")
    steered.node.wait(lambda: steered.observed(name), f"a report of {name}")
    return devices(steered, name)


@pytest.mark.parametrize("policy", POLICIES)
def test_pods_with_1_2_and_4_gpus_get_exactly_their_gpus(
    start_steered: StartSteered, policy: str
) -> None:
    numa = {} if policy == "none" else {"numa": (0,) * len(GPUS)}
    steered = start_steered(len(GPUS), 3, topologyManagerPolicy=policy, **numa)
    assert steered.reported().plugin.steers_several
    # The plugin would distribute the replicas differently.
    assert admitted(steered, gpu_pod("one"), ["GPU-1"]) == {"main": ["GPU-1"]}
    assert admitted(steered, wide_pod("two", 2), ["GPU-1", "GPU-3"]) == {"main": ["GPU-1", "GPU-3"]}
    assert admitted(steered, wide_pod("four", 4), GPUS) == {"main": GPUS}
    rest = ["GPU-0", "GPU-2", "GPU-3"]  # GPU-1 has no free replica.
    assert admitted(steered, wide_pod("three", 3), rest) == {"main": rest}
    # With a topology policy, the kubelet takes the last replicas without calling the plugin.
    assert admitted(steered, wide_pod("last", 2), ["GPU-0", "GPU-2"]) == {
        "main": ["GPU-0", "GPU-2"]
    }
    node = steered.node
    node.wait(lambda: node.runtime.running("two"), "a container")
    environment = node.runtime.running("two")["main"].environment
    assert set(environment["NVIDIA_VISIBLE_DEVICES"].split(",")) == {"GPU-1", "GPU-3"}


def test_a_pod_with_8_gpus_gets_all_of_them_beside_shared_pods(
    start_steered: StartSteered,
) -> None:
    steered = start_steered(8, 2)
    every = [f"GPU-{n}" for n in range(8)]
    assert admitted(steered, gpu_pod("one"), ["GPU-6"]) == {"main": ["GPU-6"]}
    assert admitted(steered, wide_pod("eight", 8), every) == {"main": every}
    # GPU-6 has no free replica.
    rest = [uuid for uuid in every if uuid != "GPU-6"]
    assert admitted(steered, wide_pod("seven", 7), rest) == {"main": rest}


def test_pods_on_one_set_are_admitted_in_any_order(start_steered: StartSteered) -> None:
    """While pods are unconfirmed, other pods are bound only to the same set of devices."""
    steered = start_steered(len(GPUS), 4)
    where = ["GPU-0", "GPU-2"]
    names = ["a", "b", "deleted", "c"]
    for name in names:
        steered.reservation(wide_pod(name, 2), where, 4)
    steered.node.delete("deleted", by_force=True)
    names.remove("deleted")
    for name in reversed(names):
        steered.bind(name)
    for name in names:
        steered.node.wait(lambda name=name: steered.node.held(name), f"a pod {name}")
        assert devices(steered, name) == {"main": where}


def test_several_containers_use_the_devices_of_one_set(start_steered: StartSteered) -> None:
    """The kubelet gives the devices of an ordinary init container to the next container."""
    steered = start_steered(len(GPUS), 4)
    where = ["GPU-1", "GPU-2", "GPU-3"]
    init = gpu_container("init", "exit", "0", gpus=2)
    containers = [gpu_container("main", gpus=3), gpu_container("side", gpus=1)]
    pod = gpu_pod("p", initContainers=[init], containers=containers)
    steered.reservation(pod, where, 4, count=4)
    steered.bind("p")
    node = steered.node
    node.wait(lambda: len(devices(steered, "p")) == 2, "both containers")
    found = devices(steered, "p")
    assert found["main"] == where
    assert set(found["side"]) < set(where)


@pytest.mark.parametrize("policy", POLICIES)
def test_agent_plugin_and_kubelet_may_restart_between_pods(
    start_steered: StartSteered, policy: str
) -> None:
    """Pods with a part of a GPU, with two, with four and with eight GPUs come in between."""
    gpus = [f"GPU-{n}" for n in range(8)]
    numa = {} if policy == "none" else {"numa": (0,) * len(gpus)}
    steered = start_steered(len(gpus), 4, topologyManagerPolicy=policy, **numa)
    node = steered.node
    part, pair, four = ["GPU-5"], ["GPU-2", "GPU-7"], ["GPU-1", "GPU-3", "GPU-5", "GPU-6"]
    assert admitted(steered, gpu_pod("part"), part) == {"main": part}
    assert admitted(steered, wide_pod("pair", 2), pair) == {"main": pair}
    node.end("agent")
    steered.start_agent()
    assert admitted(steered, wide_pod("four", 4), four) == {"main": four}
    # The kubelet rejects pods until the plugin has registered again, and the plugin chooses until
    # the agent has.
    registrations = node.log("agent").count("steering_registered")
    node.kill("nvidia-device-plugin")
    node.start_plugin()
    node.wait(
        lambda: node.log("agent").count("steering_registered") > registrations, "a registration"
    )
    node.wait(lambda: node.allocatable() == 4 * len(gpus), "every replica")
    steered.until_steered()
    assert admitted(steered, wide_pod("eight", 8), gpus) == {"main": gpus}
    # The plugin chooses until the agent has registered with the restarted kubelet.
    registrations = node.log("agent").count("steering_registered")
    with node.kubelet_restarts():
        pass
    node.wait(
        lambda: node.log("agent").count("steering_registered") > registrations, "a registration"
    )
    steered.until_steered()
    assert admitted(steered, wide_pod("again", 4), four) == {"main": four}
    assert admitted(steered, gpu_pod("last"), pair[1:]) == {"main": pair[1:]}
    assert devices(steered, "four") == {"main": four}


def test_the_plugin_rejects_several_replicas_if_configured(start_steered: StartSteered) -> None:
    """The extender does not bind such pods, because the agent reports the setting."""
    shared = {"name": RESOURCE, "replicas": 3}
    slicing = {"failRequestsGreaterThanOne": True, "resources": [shared]}
    steered = start_steered(2, 3, plugin={"sharing": {"timeSlicing": slicing}})
    assert steered.reported().plugin.fail_requests_greater_than_one is True
    steered.reservation(wide_pod("p", 2), ["GPU-0", "GPU-1"], 4)
    steered.bind("p")
    node = steered.node
    node.wait(lambda: node.status("p")["phase"] == "Failed", "a pod that was rejected")
    assert "maximum request size for shared resources is 1" in node.status("p")["message"]
