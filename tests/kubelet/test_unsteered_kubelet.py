"""Checks that the agent does not steer a node with the newest kubelet, and reports why."""

import pytest

from tests.kubelet.node_objects import RESOURCE
from tests.kubelet.steered_node import StartSteered, start_steered

pytestmark = pytest.mark.since("1.37")

__all__ = ["start_steered"]

NEWEST = "kubelet"


def test_a_node_with_the_newest_kubelet_is_not_steered_and_reports_why(
    start_steered: StartSteered,
) -> None:
    steered = start_steered(flags=("--device-choice=steered",), kubelet=NEWEST)
    node = steered.node
    node.wait(steered.obstacle, "an obstacle")
    assert steered.obstacle().startswith("steering needs a kubelet older than 1.37")
    assert not steered.steered()
    assert not steered.reported().plugin.steers_several
    assert {steered.device(f"p{number}") for number in range(2)} == {"GPU-0", "GPU-1"}
    assert node.allocatable() == 6
    assert node.log("kubelet").count("Got registration request") == 1  # The plugin's own choice.
    assert not list((node.root / "device-plugins").glob("headroom-*"))
    # Later pods are not affected, whether the agent ends or is killed.
    node.end("agent")
    assert steered.device("after-its-end") in ("GPU-0", "GPU-1")
    steered.start_agent("--device-choice=steered")
    node.kill("agent")
    node.kill("nvidia-device-plugin")
    # Wait, because the kubelet rejects a pod that arrives before the plugin is registered again.
    node.wait(lambda: node.allocatable() == 0, "a node without replicas")
    node.start_plugin()
    node.wait(lambda: node.allocatable() == 6, "every replica")
    assert node.log("kubelet").count("Got registration request") == 2  # The plugin's own choice.
    assert steered.device("after-its-kill") in ("GPU-0", "GPU-1")
    assert steered.resource == RESOURCE


def test_upgrading_the_kubelet_ends_steering_and_keeps_every_replica(
    start_steered: StartSteered,
) -> None:
    steered = start_steered()
    node = steered.node
    assert [steered.place(f"p{number}", "GPU-1") for number in range(2)] == ["GPU-1"] * 2
    node.replace_kubelet(NEWEST)
    node.wait(lambda: "kubelet older than 1.37" in steered.obstacle(), "an obstacle")
    node.wait(lambda: not steered.steered(), "a report without steering")
    node.wait(lambda: not list((node.root / "device-plugins").glob("headroom-*")), "no trace")
    node.wait(lambda: node.allocatable() == 6, "every replica")
    assert steered.device("by-the-plugin") == "GPU-0"
    # The kubelet notices that the relay has ended, and uses the plugin again.
    node.kill("nvidia-device-plugin")
    node.wait(lambda: node.allocatable() == 0, "a node without replicas")
    node.start_plugin()
    node.wait(lambda: node.allocatable() == 6, "every replica")
    assert steered.device("after-the-restart") in ("GPU-0", "GPU-1")
