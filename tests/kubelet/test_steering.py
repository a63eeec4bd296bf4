"""Tests a steered node, on which our agent runs between a real kubelet and a real plugin.

The tests act as the extender, which writes reservations into the GPUNode and binds pods.
"""

from agent.steering.plugin_return import plugin_socket
from tests.driver import Gpu, Instance
from tests.kubelet.node_objects import RESOURCE, gpu_container, gpu_pod
from tests.kubelet.relay import register
from tests.kubelet.steered_node import GIB, StartSteered, start_steered

__all__ = ["start_steered"]


PLUGIN = plugin_socket(RESOURCE)


def test_every_pod_gets_its_reserved_device(start_steered: StartSteered) -> None:
    steered = start_steered()
    # The plugin would alternate between the devices.
    assert [steered.place(f"p{i}", "GPU-1") for i in range(3)] == ["GPU-1"] * 3
    assert [steered.place(f"q{i}", "GPU-0") for i in range(2)] == ["GPU-0"] * 2
    node = steered.node
    node.wait(lambda: node.runtime.running("p2"), "a container")
    environment = node.runtime.running("p2")["main"].environment
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "GPU-1"
    assert node.allocatable() == 6


def test_a_pod_whose_init_container_also_requests_the_gpu_is_no_bypass(
    start_steered: StartSteered,
) -> None:
    """The init container gets a replica, and the next container gets the same replica."""
    steered = start_steered(gpus=2, replicas=8)
    node = steered.node
    registered = node.log("agent").count("steering_registered")
    for number in range(3):
        name = f"p{number}"
        pod = gpu_pod(name)
        init = gpu_container("init", takes_bytes=0)
        init.pop("restartPolicy", None)
        pod["spec"]["initContainers"] = [init]
        steered.reservation(pod, "GPU-1", 4)
        steered.bind(name)
        node.wait(lambda name=name: bool(node.held(name)), f"a pod {name} that was admitted")
        assert {held.device for held in node.held(name)} == {"GPU-1"}
        node.wait(lambda name=name: steered.observed(name), f"a report of {name}")
        assert steered.steered() == [RESOURCE]
    log = node.log("agent")
    assert "steering_bypassed" not in log
    assert log.count("steering_registered") == registered


def test_the_first_pod_shows_that_the_plugin_has_registered_again(
    start_steered: StartSteered,
) -> None:
    steered = start_steered()
    node = steered.node
    assert steered.place("p", "GPU-1") == "GPU-1"
    register(
        node.root / "device-plugins", PLUGIN, RESOURCE
    )  # Now both the agent and the plugin are registered.
    assert steered.place("q", "GPU-1") == "GPU-0"  # The plugin's choice.
    node.wait(lambda: "steering_bypassed" in node.log("agent"), "that it is noticed")
    node.wait(lambda: node.log("agent").count("steering_registered") == 2, "its place again")
    steered.until_steered()
    assert steered.place("r", "GPU-1") == "GPU-1"


def test_xids_reach_the_kubelet_across_restarts_of_the_agent(start_steered: StartSteered) -> None:
    """The plugin sends each XID to only one stream, and does not notice the end of a stream."""
    steered = start_steered(gpus=6, replicas=2)
    node = steered.node

    def fails(number: int) -> None:
        node.driver.fail(f"GPU-{number}", 79)
        # The plugin marks one replica of the device as unhealthy.
        node.wait(lambda: node.allocatable() == 11 - number, f"the XID of GPU-{number}")

    fails(0)
    node.end("agent")
    fails(1)
    steered.start_agent()
    fails(2)
    node.kill("agent")
    node.wait(lambda: node.allocatable() == 0, "a node without replicas")
    steered.start_agent()
    node.wait(lambda: node.allocatable() == 9, "the replicas of healthy devices")
    fails(3)
    node.end("agent")
    steered.start_agent()
    node.end("agent")
    fails(4)


def test_unattributed_use_takes_no_reserved_memory_and_full_devices_get_no_pod(
    start_steered: StartSteered,
) -> None:
    steered = start_steered()  # Devices have 80 GiB and three replicas.
    node = steered.node
    assert steered.place("old", "GPU-1", gib=40) == "GPU-1"
    node.wait(lambda: steered.observed("old"), "a report that shows it")
    assert steered.device("stranger") == "GPU-0"  # The device with the most free memory.
    assert steered.place("beside", "GPU-0", gib=30) == "GPU-0"
    # Reserve memory as if there were no unattributed process.
    assert steered.place("elsewhere", "GPU-0", gib=30) == "GPU-1"
    steered.reservation(gpu_pod("large"), "GPU-0", gib=30)
    steered.bind("large")
    node.wait(lambda: node.status("large")["phase"] == "Failed", "a pod that was rejected")
    status = node.status("large")
    assert status["reason"] == "UnexpectedAdmissionError"
    assert "no GPU of this node has enough free memory" in status["message"]


def test_without_its_agent_a_node_admits_no_pods_and_running_pods_continue(
    start_steered: StartSteered,
) -> None:
    steered = start_steered()
    node = steered.node
    steered.place("before", "GPU-1")
    node.wait(lambda: node.status("before")["phase"] == "Running", "a pod that runs")
    node.kill("agent")
    node.wait(lambda: node.allocatable() == 0, "a node without replicas")
    node.bind(gpu_pod("between"))
    node.wait(lambda: "UnexpectedAdmissionError" in node.events("between"), "a refusal")
    assert node.status("before")["phase"] == "Running"
    steered.start_agent()
    node.wait(lambda: node.allocatable() == 6, "every replica")
    assert steered.place("after", "GPU-1") == "GPU-1"
    # Kill the agent again and turn steering off, so that the next agent restores the plugin.
    node.kill("agent")
    node.wait(lambda: node.allocatable() == 0, "a node without replicas")
    steered.start_agent("--namespace=headroom-system")
    node.wait(lambda: node.allocatable() == 6, "every replica")
    node.wait(lambda: not steered.steered(), "a report without steering")
    assert steered.device("last") == "GPU-0"  # The plugin's choice.
    node.wait(lambda: not list((node.root / "device-plugins").glob("headroom-*")), "no trace")
    assert {pod: node.status(pod)["phase"] for pod in ("before", "after")} == {
        "before": "Running",
        "after": "Running",
    }


def test_a_stopping_agent_waits_for_unconfirmed_pods_and_restores_the_plugin(
    start_steered: StartSteered,
) -> None:
    steered = start_steered()
    node = steered.node
    steered.place("before", "GPU-1")
    node._processes["first"] = node._processes.pop("agent")
    node.runtime.reach = {}  # The first agent still listens on its port.
    steered.start_agent("--device-choice=steered")
    node.wait(lambda: '"started"' in node.log("agent"), "a second agent, which waits for its turn")
    assert steered.place("still", "GPU-1") == "GPU-1"
    node.end("first")
    steered.until_steered()
    steered.reservation(gpu_pod("on-its-way"), "GPU-1", 4)
    node._processes["agent"].terminate()
    node.wait(lambda: not steered.steered(), "a report without steering")
    steered.bind("on-its-way")
    node.end("agent")
    assert node.held("on-its-way")[0].device == "GPU-1"
    node.wait(lambda: node.allocatable() == 6, "the plugin's replicas")
    assert steered.device("after") == "GPU-0"  # The plugin's choice.
    assert not list((node.root / "device-plugins").glob("headroom-*"))
    assert node.log("nvidia-device-plugin").count("Registered device plugin") == 1
    assert "plugin_brought_back" in node.log("agent")


def test_the_plugin_is_not_restored_while_an_unconfirmed_pod_depends_on_the_agents_choice(
    start_steered: StartSteered,
) -> None:
    """The plugin would choose by its counts, but the pod's memory is reserved on one device."""
    steered = start_steered()
    node = steered.node
    steered.place("before", "GPU-1")
    steered.reservation(gpu_pod("late"), "GPU-1", 4)
    node._processes["agent"].terminate()
    node.end("agent")
    node.wait(lambda: node.allocatable() == 0, "a node without replicas")
    assert not steered.steered()
    # The next agent does not steer, but it also waits.
    steered.start_agent("--namespace=headroom-system")
    node.wait(lambda: '"started"' in node.log("agent"), "an agent")
    node.bind(gpu_pod("between"))
    node.wait(lambda: "UnexpectedAdmissionError" in node.events("between"), "a refusal")
    assert node.allocatable() == 0
    steered.forget([node.uid("late")])
    node.wait(lambda: node.allocatable() == 6, "the plugin's replicas")
    assert steered.device("after") == "GPU-0"  # The plugin's choice.
    assert node.status("before")["phase"] == "Running"
    node.wait(lambda: not list((node.root / "device-plugins").glob("headroom-*")), "no trace")


def test_the_agent_steers_again_after_plugin_or_kubelet_restart_with_the_same_resource_name(
    start_steered: StartSteered,
) -> None:
    steered = start_steered()
    node = steered.node
    assert steered.place("first", "GPU-1") == "GPU-1"
    node.kill("nvidia-device-plugin")
    node.wait(lambda: not steered.steered(), "a report without steering")
    node.start_plugin()
    steered.until_steered()
    assert steered.place("second", "GPU-1") == "GPU-1"
    node.kill("kubelet")
    node.wait(lambda: not steered.steered(), "a report without steering")
    node.start_kubelet()
    steered.until_steered()
    assert steered.place("third", "GPU-1") == "GPU-1"
    assert node.allocatable() == 6
    # The reconfigured plugin offers the resource with another name, which is also steered.
    node.kill("nvidia-device-plugin")
    file = node.folder / "plugin.yaml"
    shared = "timeSlicing:\n    renameByDefault: true"
    file.write_text(file.read_text().replace("timeSlicing:", shared))
    node.start_plugin()
    node.wait(lambda: f"{RESOURCE}.shared" in node.object()["status"]["allocatable"], "its name")
    node.wait(lambda: steered.steered() == [f"{RESOURCE}.shared"], "a report with steering")
    assert node.allocatable() == 0


def test_gpus_on_several_numa_nodes_are_not_steered_if_the_kubelet_aligns_devices(
    start_steered: StartSteered,
) -> None:
    """The node is not steered because the kubelet could take a different device than the reserved
    device.
    """
    steered = start_steered(
        numa=(0, 1),
        topologyManagerPolicy="single-numa-node",
        flags=("--device-choice=steered",),
    )
    steered.node.wait(lambda: steered.obstacle(), "an obstacle")
    assert "topology manager has policy single-numa-node" in steered.obstacle()
    assert not steered.steered()
    assert steered.device("p") in ("GPU-0", "GPU-1")
    assert not list((steered.node.root / "device-plugins").glob("headroom-*"))


def test_the_mode_in_the_gpunode_turns_steering_on_and_off(start_steered: StartSteered) -> None:
    steered = start_steered(flags=("--device-choice=predicted",))
    node = steered.node
    node.wait(lambda: steered.observed_at(), "a report")
    device = steered.device("stock")  # The plugin chooses, and would use the other device next.
    (other,) = {"GPU-0", "GPU-1"} - {device}
    steered.choose("steered")
    steered.until_steered()
    assert steered.place("steered", device) == device
    # The agent continues to choose, because an unconfirmed pod depends on its choice.
    steered.reservation(gpu_pod("on-the-way"), device, 4)
    steered.choose("predicted")
    node.wait(lambda: not steered.steered(), "a report without steering")
    steered.bind("on-the-way")
    node.wait(lambda: node.held("on-the-way"), "a pod that was admitted")
    assert node.held("on-the-way")[0].device == device
    node.wait(lambda: "plugin_brought_back" in node.log("agent"), "the plugin")
    node.wait(lambda: node.allocatable() == 6, "every replica")
    assert not list((node.root / "device-plugins").glob("headroom-*"))
    assert steered.device("then") == other  # The plugin's choice.
    for choice in ("gated", "steered", "", "steered"):
        steered.choose(choice)
        wanted = [RESOURCE] if choice == "steered" else []
        node.wait(lambda wanted=wanted: steered.steered() == wanted, f"mode {choice}")
    assert steered.place("at-last", other) == other
    assert node.allocatable() == 6


def test_shared_mig_devices_are_steered(start_steered: StartSteered) -> None:
    """The strategy is mixed, two MIG devices have the same profile, and the name of the resource
    implies sharing.
    """
    profile = "nvidia.com/mig-1g.10gb"
    resource = f"{profile}.shared"
    small = (Instance(f"MIG-{number}", number) for number in (1, 2))
    large = Instance("MIG-3", 3, memory_bytes=40 * GIB, model="NVIDIA H100 80GB HBM3 MIG 3g.40gb")
    shared = {"resources": [{"name": profile, "replicas": 3}], "renameByDefault": True}
    steered = start_steered(
        [Gpu("GPU-0", instances=(*small, large))],
        plugin={"flags": {"migStrategy": "mixed"}, "sharing": {"timeSlicing": shared}},
        resource=resource,
        devices=2,
    )
    node = steered.node
    assert [steered.place(f"p{i}", "MIG-2", 2) for i in range(2)] == ["MIG-2"] * 2
    assert steered.place("q", "MIG-1", 2) == "MIG-1"

    for pod, uuid in {"p0": "MIG-2", "q": "MIG-1"}.items():
        # The plugin also reports the device by its UUID.
        node.wait(lambda pod=pod: node.runtime.running(pod), "a container")
        environment = node.runtime.running(pod)["main"].environment
        assert environment["NVIDIA_VISIBLE_DEVICES"] == uuid
