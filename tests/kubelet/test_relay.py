"""Tests a relay between an unmodified kubelet and an unmodified plugin, which is the basis of
`steered` nodes.
"""

import contextlib
from collections.abc import Iterator

import pytest

from tests.kubelet.conftest import STEERED_KUBELET, StartNode
from tests.kubelet.node import Node
from tests.kubelet.node_objects import RESOURCE, gpu_pod
from tests.kubelet.relay import Relay, register

PLUGIN = "nvidia-gpu.sock"


@contextlib.contextmanager
def relay(node: Node) -> Iterator[Relay]:
    """A registered relay that always chooses the last device."""
    running = Relay(node.root / "device-plugins", PLUGIN, RESOURCE, max)
    try:
        running.register()
        node.wait(lambda: "ListAndWatch" in running.calls, "the kubelet's interest")
        yield running
    finally:
        running.stop()


def plugins_choice(node: Node, pod: str) -> bool:
    """Return whether the plugin chose the device of a pod. The relay would have chosen the last
    device.
    """
    return device(node, pod) == "GPU-0"


def device(node: Node, pod: str) -> str:
    (held,) = node.admit(gpu_pod(pod))
    return held.device


def plugin_starts(node: Node, count: int) -> bool:
    return node.log("nvidia-device-plugin").count("Registered device plugin") == count


def test_the_relay_chooses_the_device_and_the_plugin_allocates_it(start_node: StartNode) -> None:
    node = start_node(gpus=2, replicas=3, kubelet=STEERED_KUBELET)
    with relay(node) as running:
        # The plugin would alternate between the devices, but the pods get the devices that the
        # relay chooses.
        assert [device(node, f"p{number}") for number in range(4)] == ["GPU-1"] * 3 + ["GPU-0"]
        assert running.calls[-2:] == ["GetPreferredAllocation", "Allocate"]
        node.wait(lambda: node.runtime.running("p2"), "a container")
        environment = node.runtime.running("p2")["main"].environment
        assert environment["NVIDIA_VISIBLE_DEVICES"] == "GPU-1"
        assert node.allocatable() == 6
        node.driver.fail("GPU-0", 79)
        node.wait(lambda: node.allocatable() == 5, "the plugin's bad news")


def test_after_the_relay_dies_no_pod_starts_until_the_plugin_is_restored(
    start_node: StartNode,
) -> None:
    node = start_node(gpus=2, replicas=2, kubelet=STEERED_KUBELET)
    with relay(node):
        node.run(gpu_pod("before"))
    node.wait(lambda: node.allocatable() == 0, "a node without replicas")
    assert node.status("before")["phase"] == "Running"
    assert [held.pod for held in node.held()] == ["before"]
    register(node.root / "device-plugins", PLUGIN, RESOURCE)  # Any process may do this.
    node.wait(lambda: node.allocatable() == 4, "the plugin's replicas")
    assert device(node, "after") == "GPU-0"


def test_restoring_the_plugin_before_the_relay_ends_is_too_early(start_node: StartNode) -> None:
    node = start_node(gpus=2, replicas=2, kubelet=STEERED_KUBELET)
    with relay(node) as running:
        calls = list(running.calls)
        register(node.root / "device-plugins", PLUGIN, RESOURCE)
        node.admit(gpu_pod("p"))
        assert running.calls == calls  # The kubelet calls the plugin directly.
    node.wait(lambda: node.allocatable() == 0, "a node without replicas")


def test_a_restarted_plugin_chooses_until_the_relay_registers_again(start_node: StartNode) -> None:
    node = start_node(gpus=2, replicas=4, kubelet=STEERED_KUBELET)
    with relay(node) as running:
        assert [device(node, f"p{number}") for number in range(2)] == ["GPU-1"] * 2
        node.kill("nvidia-device-plugin")
        node.wait(lambda: node.allocatable() == 0, "a node without replicas")
        node.start_plugin()
        node.wait(lambda: node.allocatable() == 8, "the plugin's replicas")
        assert device(node, "q") == "GPU-0"  # The plugin's choice.
        running.register()
        node.wait(lambda: running.calls.count("ListAndWatch") == 2, "the kubelet's interest")
        assert device(node, "r") == "GPU-1"


def test_a_restarted_kubelet_removes_the_relays_socket(start_node: StartNode) -> None:
    node = start_node(gpus=2, replicas=4, kubelet=STEERED_KUBELET)
    with relay(node):
        assert [device(node, f"p{number}") for number in range(2)] == ["GPU-1"] * 2
        node.kill("kubelet")
        node.start_kubelet()
        node.wait(lambda: plugin_starts(node, 2), "the plugin's second registration")
        assert not (node.root / "device-plugins/relay.sock").exists()
        assert device(node, "q") == "GPU-0"  # The plugin's choice.
    with relay(node):
        assert device(node, "r") == "GPU-1"


@pytest.mark.since("1.37")
def test_a_newer_kubelet_uses_the_plugin_as_soon_as_the_relay_dies(start_node: StartNode) -> None:
    """A pod that is already bound then gets the plugin's choice. Therefore newer kubelets are not
    steered.
    """
    node = start_node(gpus=2, replicas=2, kubelet="kubelet")
    with relay(node) as running:
        assert device(node, "before") == "GPU-1"
        before = len(running.calls)
    assert plugins_choice(node, "after")
    assert running.calls[before:] == []
    assert node.allocatable() == 4
