"""The newest kubelet is not steered: the agent leaves its device plugins alone, and reports why."""

import pytest

from tests.kubelet.node_objects import RESOURCE
from tests.kubelet.steered_node import StartSteered, start_steered

pytestmark = pytest.mark.since("1.37")

__all__ = ["start_steered"]

NEWEST = "kubelet"


def test_a_node_with_the_newest_kubelet_goes_on_without_steering_and_reports_why(
    start_steered: StartSteered,
) -> None:
    steered = start_steered(flags=("--device-choice=steered",), kubelet=NEWEST)
    node = steered.node
    node.wait(steered.obstacle, "an obstacle")
    assert steered.obstacle().startswith("steering needs a kubelet older than 1.37")
    assert not steered.steered()
    assert {steered.device(f"p{number}") for number in range(2)} == {"GPU-0", "GPU-1"}
    assert node.allocatable() == 6
    assert node.log("kubelet").count("Got registration request") == 1  # the plugin's own
    assert not list((node.root / "device-plugins").glob("headroom-*"))
    # Ended or killed, the agent changes nothing for pods that come later.
    node.end("agent")
    assert steered.device("after-its-end") in ("GPU-0", "GPU-1")
    steered.start_agent("--device-choice=steered")
    node.kill("agent")
    node.kill("nvidia-device-plugin")
    # The kubelet rejects a pod that comes before it has the plugin's devices again.
    node.wait(lambda: node.allocatable() == 0, "a node without replicas")
    node.start_plugin()
    node.wait(lambda: node.allocatable() == 6, "every replica")
    assert node.log("kubelet").count("Got registration request") == 2  # the plugin's own
    assert steered.device("after-its-kill") in ("GPU-0", "GPU-1")
    assert steered.resource == RESOURCE


def test_a_kubelet_that_is_upgraded_ends_steering_and_keeps_every_replica(
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
    # The kubelet notices when the plugin ends, and takes it back.
    node.kill("nvidia-device-plugin")
    node.wait(lambda: node.allocatable() == 0, "a node without replicas")
    node.start_plugin()
    node.wait(lambda: node.allocatable() == 6, "every replica")
    assert steered.device("after-the-restart") in ("GPU-0", "GPU-1")
