"""The agent's probes on real nodes: who holds what, as kubelet, plugin and runtime have it."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import yaml
from kubernetes.client import ApiClient

from agent.api_server import of_client
from agent.peak_recorder import PeakRecorder
from agent.probes.cgroup import is_static
from agent.probes.checkpoint import read_checkpoint
from agent.probes.kubelet import SETTLED_AFTER_S, KubeletProbe
from agent.probes.node_probe import NodeApi
from agent.probes.nvml import Memory
from agent.probes.plugin_config import ConfigurationProbe
from agent.probes.processes import ProcessProbe
from agent.probes.readings import (
    DeviceReading,
    DriverReading,
    HoldingReading,
    Reading,
    SourceReading,
)
from agent.status_builder import summarise
from contract.gpunode import Device, GPUNodeStatus, PodUse
from tests.controlplane import ROOT
from tests.driver import library_folder
from tests.kubelet.conftest import StartNode
from tests.kubelet.node import Node
from tests.kubelet.node_objects import RESOURCE, gpu_container, gpu_pod

GIB = 1 << 30


@dataclass
class Agent:
    """The probes of pods and devices, on one node; the driver's part is a table."""

    node: Node
    proc: Path
    #: Less than an agent's, where a test waits it out and the kubelet is not restarted.
    settled_after_s: float = SETTLED_AFTER_S
    before: GPUNodeStatus | None = None
    api: NodeApi | None = None
    kubelet: KubeletProbe = field(init=False)
    configuration: ConfigurationProbe = field(init=False)
    processes: ProcessProbe = field(init=False)

    def __post_init__(self) -> None:
        root = self.node.root
        self.kubelet = KubeletProbe(
            root / "device-plugins/kubelet_internal_checkpoint",
            root / "pod-resources/kubelet.sock",
            settled_after_s=self.settled_after_s,
        )
        self.configuration = ConfigurationProbe(self.proc, root / "device-plugins")
        self.processes = ProcessProbe(self.proc)
        self.peaks = PeakRecorder(None)

    def sample(self) -> GPUNodeStatus:
        self._show_processes()
        readings: list[Reading] = [DriverReading("nvml"), *self._devices()]
        readings += self.kubelet.read()
        readings += self.configuration.read()
        if self.api is not None:
            readings += self.api.read()
            readings += self.api.follow(readings)
        readings += self.processes.follow(readings)
        self.before = summarise(
            readings, datetime.now(UTC), before=self.before, measure=self.peaks.measure
        )
        return self.before

    def _devices(self) -> Iterator[DeviceReading]:
        """As the agent's own probe reads them from the driver's library."""
        index = -1
        found: dict[str, Any] = {}
        for line in [*self.node.driver.table.read_text().splitlines(), "device"]:
            match line.split(maxsplit=5):
                case ["device", *rest]:
                    if found:
                        yield DeviceReading("nvml", **found)
                    if rest:
                        index += 1
                        total, reserved, free = map(int, rest[1:4])
                        memory = Memory(total, free, reserved)
                        found = {"uuid": rest[0], "index": index, "memory": memory, "processes": {}}
                case ["process", _, pid, used]:
                    found["processes"][int(pid)] = int(used)

    def _show_processes(self) -> None:
        """A /proc with the runtime's processes in it, and of the machine's only this node's."""
        self.proc.mkdir(exist_ok=True)
        for old in self.proc.iterdir():
            if old.is_symlink():
                old.unlink()
        for pid, cgroup in ((1, "0::/init.scope"), (2, "0::/")):
            (self.proc / str(pid)).mkdir(exist_ok=True)
            (self.proc / str(pid) / "cgroup").write_text(f"{cgroup}\n")
        (self.proc / "2/comm").write_text("kthreadd\n")
        for process in self.node._processes.values():
            (self.proc / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        for folder in self.node.runtime.proc.glob("*"):
            (self.proc / folder.name).symlink_to(folder)


@pytest.fixture
def start_agent(tmp_path: Path) -> Callable[..., Agent]:
    return lambda node, **settings: Agent(node, tmp_path / "proc", **settings)


StartAgent = Callable[..., Agent]


def rows(status: GPUNodeStatus) -> list[tuple[str, str, str, str, str]]:
    return sorted((p.name, p.uid, p.container, p.replica, p.device) for p in status.pods)


def given(node: Node, *pods: str) -> list[tuple[str, str, str, str, str]]:
    """The devices that the runtime gave to containers, with the replica that the node's own
    account names."""
    found = []
    for pod in pods:
        replicas = {held.container: held.replica for held in node.held(pod)}
        for name, container in node.runtime.running(pod).items():
            (device,) = container.devices
            uid = container.sandbox.config.metadata.uid
            found.append((pod, uid, name, replicas[name], device))
    return sorted(found)


def by_uuid(status: GPUNodeStatus) -> dict[str, Device]:
    assert len({device.uuid for device in status.devices}) == len(status.devices)
    return {device.uuid: device for device in status.devices}


def states(status: GPUNodeStatus) -> dict[str, str]:
    return {source.name: source.state for source in status.sources}


def used(status: GPUNodeStatus) -> dict[str, int | None]:
    return {pod.name: pod.used_bytes for pod in status.pods}


def test_the_containers_of_a_pod_have_their_own_use_and_peaks(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    """Their names are in the mounts that the kubelet asks the runtime for."""
    node = start_node(gpus=1, replicas=4)
    agent = start_agent(node)
    two = [gpu_container("one", takes_bytes=3 * GIB), gpu_container("two", takes_bytes=5 * GIB)]
    node.run(gpu_pod("d", containers=two))
    assert {p.container: (p.used_bytes, p.peak_bytes) for p in agent.sample().pods} == {
        "one": (3 * GIB, 3 * GIB),
        "two": (5 * GIB, 5 * GIB),
    }
    one = node.runtime.running("d")["one"]
    node.runtime.use(one, 2 * GIB)
    assert {p.container: (p.used_bytes, p.peak_bytes) for p in agent.sample().pods} == {
        "one": (2 * GIB, 3 * GIB),
        "two": (5 * GIB, 5 * GIB),
    }


def test_a_container_that_restarts_begins_a_life(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    node = start_node(gpus=1, replicas=4)
    agent = start_agent(node)
    containers = [gpu_container("main", takes_bytes=3 * GIB)]
    node.run(gpu_pod("p", restartPolicy="Always", containers=containers))
    first = node.runtime.running("p")["main"]
    node.runtime.use(first, 9 * GIB)
    assert [p.peak_bytes for p in agent.sample().pods] == [9 * GIB]
    node.runtime.exit(first, 1)
    node.wait(lambda: node.runtime.running("p"), "the container starts again")
    assert node.runtime.running("p")["main"].id != first.id
    assert [(p.used_bytes, p.peak_bytes) for p in agent.sample().pods] == [(3 * GIB, 3 * GIB)]


def test_the_report_names_what_every_container_was_given_and_uses(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    node = start_node(gpus=2, replicas=4)
    agent = start_agent(node)
    for name, gib in (("a", 3), ("b", 5), ("c", 7)):
        node.run(gpu_pod(name, containers=[gpu_container("main", takes_bytes=gib * GIB)]))
    two = [gpu_container("one", takes_bytes=GIB), gpu_container("two", takes_bytes=GIB)]
    node.run(gpu_pod("d", containers=two))
    status = agent.sample()
    assert rows(status) == given(node, "a", "b", "c", "d")
    assert states(status) == dict.fromkeys(
        ("checkpoint", "kubelet", "nvml", "plugin", "podresources", "proc"), "ok"
    ), status.sources
    bytes_of = used(status)
    assert [bytes_of[name] for name in "abc"] == [3 * GIB, 5 * GIB, 7 * GIB]
    assert sum(p.used_bytes or 0 for p in status.pods if p.name == "d") == 2 * GIB
    for device in status.devices:
        assert (device.resource, device.sharing) == (RESOURCE, "time-slicing")
        held = [p for p in status.pods if p.device == device.uuid]
        assert (device.replicas.allocated, device.replicas.free) == (len(held), 4 - len(held))
        assert device.unattributed_bytes == 0
        assert device.used_bytes == sum(p.used_bytes or 0 for p in held)
    plugin = status.plugin
    assert (plugin.allocation_policy, plugin.device_list_strategy) == ("distributed", "envvar")
    assert plugin.fail_requests_greater_than_one is False
    assert plugin.topology_manager_policy == "none"


def test_a_checksum_of_a_real_kubelet_is_the_one_that_we_compute(start_node: StartNode) -> None:
    node = start_node(gpus=2, replicas=2, numa=(0, 1))
    file = node.root / "device-plugins/kubelet_internal_checkpoint"
    assert read_checkpoint(file, verify=True).verified  # nothing but registered devices
    node.admit(gpu_pod("a"))
    node.admit(gpu_pod("b", containers=[gpu_container("one"), gpu_container("two")]))
    assert read_checkpoint(file, verify=True).verified
    spoilt = json.loads(file.read_text())
    spoilt["Data"]["PodDeviceEntries"][0]["ContainerName"] = "other"
    file.write_text(json.dumps(spoilt))
    assert not read_checkpoint(file, verify=True).verified


def test_a_restart_of_the_kubelet_loses_no_pod_from_the_report(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    node = start_node(gpus=2, replicas=2)
    agent = start_agent(node)
    for name in ("a", "b", "c"):
        node.run(gpu_pod(name, containers=[gpu_container("main", takes_bytes=GIB)]))
    before = agent.sample()
    assert len(before.pods) == 3
    node.kill("kubelet")
    down = agent.sample()
    assert rows(down) == rows(before)
    assert states(down)["podresources"] == "degraded"
    node.start_kubelet()
    seen = set()
    while True:
        status = agent.sample()
        assert rows(status) == rows(before)
        assert used(status) == used(before)
        seen.add(next(s.message for s in status.sources if s.name == "podresources"))
        if all(d.replicas.total == 2 and d.replicas.unhealthy == 0 for d in status.devices):
            break

    def as_before() -> bool:
        """The kubelet forgets the plugin at its own time: the loop may have ended before that."""
        now = agent.sample()
        assert rows(now) == rows(before)
        same = [d.replicas for d in now.devices] == [d.replicas for d in before.devices]
        return same and now.sources == before.sources

    node.wait(as_before, "the same sources and replicas as before")


def test_a_kubelet_that_has_not_listed_its_pods_yet_has_not_lost_them(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    """A kubelet that cannot reach the API server after its restart lists no pod."""
    node = start_node(gpus=1, replicas=2)
    agent = start_agent(node)
    node.run(gpu_pod("a"))
    before = agent.sample()
    node.kill("kubelet")
    blind = yaml.safe_load((node.folder / "kubeconfig").read_text())
    blind["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    (node.folder / "blind").write_text(yaml.safe_dump(blind))
    node.spawn_kubelet(kubeconfig="blind")

    def listed_nothing() -> bool:
        status = agent.sample()
        assert rows(status) == rows(before)
        return any("still count as running" in source.message for source in status.sources)

    node.wait(listed_nothing, "an answer without pods")
    node.kill("kubelet")
    node.start_kubelet()
    node.wait(lambda: agent.sample().sources == before.sources, "all sources in accord")
    assert rows(agent.sample()) == rows(before)


def test_an_ended_pod_leaves_the_report_though_the_checkpoint_names_it(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    node = start_node(gpus=1, replicas=2)
    agent = start_agent(node, settled_after_s=1.0)
    for name in ("a", "b"):
        node.run(gpu_pod(name))
    agent.sample()
    node.runtime.exit(node.runtime.running("a")["main"], 0)
    node.wait(lambda: node.status("a")["phase"] == "Succeeded", "the end of the pod")
    node.wait(lambda: [p.name for p in agent.sample().pods] == ["b"], "a report without it")
    status = agent.sample()
    assert len(node.checkpoint()["PodDeviceEntries"]) == 2
    assert status.devices[0].replicas.free == 1
    assert states(status)["podresources"] == "ok"
    # Why the agent only calls List: Get returns the pods that List returns, and no others.
    listed = node.listed()
    assert listed.keys() == {"b"}
    assert node.got("b") == listed["b"]
    with pytest.raises(grpc.RpcError, match="pod a in namespace default not found"):
        node.got("a")


def test_a_pod_deleted_by_force_is_reported_while_its_process_lives_and_its_successor_apart(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    node = start_node(gpus=1, replicas=2)
    agent = start_agent(node)
    stubborn = gpu_container("main", "stubborn", takes_bytes=3 * GIB)
    node.run(gpu_pod("p", terminationGracePeriodSeconds=30, containers=[stubborn]))
    old = node.uid("p")
    (row,) = agent.sample().pods
    assert (row.uid, row.name, row.used_bytes) == (old, "p", 3 * GIB)
    node.delete("p", by_force=True)
    node.run(gpu_pod("p", containers=[gpu_container("main", takes_bytes=GIB)]))
    new = node.uid("p")
    assert new != old
    (held,) = node.held("p")

    def shown() -> dict[str, tuple[str, str, int | None]]:
        return {p.uid: (p.name, p.replica, p.used_bytes) for p in agent.sample().pods}

    node.wait(lambda: new in shown(), "the new pod in the report")
    assert shown() == {old: ("", "", 3 * GIB), new: ("p", held.replica, GIB)}
    node.wait(lambda: old not in shown(), "the end of the old container")


def test_a_plugin_with_fewer_replicas_is_reported_with_the_replicas_that_it_dropped(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    node = start_node(gpus=1, replicas=4)
    agent = start_agent(node)
    for name in ("a", "b", "c", "d"):
        node.admit(gpu_pod(name))
    node.wait(lambda: all(use.uid for use in agent.sample().pods), "all have a checkpoint")
    before = agent.sample()
    assert before.devices[0].replicas.allocated == 4
    configuration = node.folder / "plugin.yaml"
    sharing = yaml.safe_load(configuration.read_text())
    sharing["sharing"]["timeSlicing"]["resources"][0]["replicas"] = 2
    configuration.write_text(yaml.safe_dump(sharing))
    node.kill("nvidia-device-plugin")
    node.start_plugin()
    node.wait(lambda: agent.sample().devices[0].replicas.total == 2, "two replicas")
    status = agent.sample()
    assert status.devices[0].replicas.allocated == 2
    assert rows(status) == rows(before)
    (complaint,) = [s.message for s in status.sources if s.name == "checkpoint"]
    assert complaint == f"a pod holds {RESOURCE} that the plugin does not advertise any more"


def test_a_renamed_resource_is_reported_and_the_pods_under_the_old_name_stay(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    node = start_node(gpus=2, replicas=2)
    agent = start_agent(node)
    node.admit(gpu_pod("a"))
    node.wait(lambda: all(use.uid for use in agent.sample().pods), "it has a checkpoint")
    before = agent.sample()
    configuration = node.folder / "plugin.yaml"
    sharing = yaml.safe_load(configuration.read_text())
    sharing["sharing"]["timeSlicing"]["renameByDefault"] = True
    configuration.write_text(yaml.safe_dump(sharing))
    node.kill("nvidia-device-plugin")
    node.start_plugin()
    renamed = f"{RESOURCE}.shared"
    node.wait(lambda: {d.resource for d in agent.sample().devices} == {renamed}, "the new name")
    status = agent.sample()
    assert [d.replicas.free for d in status.devices] == [2, 2]
    assert rows(status) == rows(before)


def test_unhealthy_replicas_and_those_of_a_missing_plugin_are_not_free(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    node = start_node(gpus=2, replicas=4)
    agent = start_agent(node)
    node.admit(gpu_pod("a"))
    agent.sample()
    node.driver.fail("GPU-0", 79)
    node.wait(lambda: by_uuid(agent.sample())["GPU-0"].replicas.unhealthy == 1, "the bad news")
    assert by_uuid(agent.sample())["GPU-1"].replicas.unhealthy == 0
    node.kill("nvidia-device-plugin")
    node.wait(
        lambda: {d.replicas.unhealthy for d in agent.sample().devices} == {4}, "no healthy replica"
    )
    assert {d.replicas.free for d in agent.sample().devices} == {0}


def test_an_unshared_device_is_reported_and_so_is_the_topology_policy(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    node = start_node(gpus=2, replicas=1, numa=(0, 1), topologyManagerPolicy="single-numa-node")
    agent = start_agent(node)
    node.admit(gpu_pod("a"))
    status = agent.sample()
    assert status.plugin.topology_manager_policy == "single-numa-node"
    assert {d.sharing for d in status.devices} == {"none"}
    assert sorted(d.replicas.free for d in status.devices) == [0, 1]
    (row,) = status.pods
    assert row.replica == row.device


def test_the_checkpoint_alone_and_podresources_alone_give_what_they_have(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    node = start_node(gpus=1, replicas=2)
    node.run(gpu_pod("a"))
    uid, (held,) = node.uid("a"), node.held("a")
    nowhere = node.folder / "nowhere"
    checkpoint = node.root / "device-plugins/kubelet_internal_checkpoint"
    socket = node.root / "pod-resources/kubelet.sock"

    def probe(checkpoint: Path, socket: Path) -> tuple[list[HoldingReading], dict[str, str]]:
        readings = list(KubeletProbe(checkpoint, socket).read())
        holdings = [r for r in readings if isinstance(r, HoldingReading)]
        return holdings, {r.source: r.state for r in readings if isinstance(r, SourceReading)}

    (alone,), reported = probe(checkpoint, nowhere)
    assert (alone.uid, alone.name, alone.replica) == (uid, "", held.replica)
    assert reported == {"checkpoint": "ok", "podresources": "absent"}
    (alone,), reported = probe(nowhere, socket)
    assert (alone.uid, alone.namespace, alone.name) == ("", "default", "a")
    assert (alone.container, alone.replica) == ("main", held.replica)
    assert reported == {"checkpoint": "absent", "podresources": "degraded"}
    assert probe(nowhere, nowhere)[0] == []


def test_a_static_pod_is_reported_by_the_uid_of_its_mirror(
    start_node: StartNode, start_agent: StartAgent, tmp_path: Path
) -> None:
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    node = start_node(gpus=1, replicas=2, staticPodPath=str(manifests), fileCheckFrequency="1s")
    agent = start_agent(node, settled_after_s=1.0)
    pod = gpu_pod("still", containers=[gpu_container("main", takes_bytes=GIB)])
    (manifests / "still.yaml").write_text(yaml.safe_dump(pod))
    mirror = f"still-{node.name}"
    node.wait(lambda: node.held(mirror) and not node.is_gone(mirror), "the mirror of the pod")
    node.wait(lambda: node.runtime.running(mirror), "its container")
    (entry,) = node.checkpoint()["PodDeviceEntries"]
    assert is_static(entry["PodUID"])
    (unresolved,) = agent.sample().pods
    assert (unresolved.uid, unresolved.name) == (entry["PodUID"], mirror)

    agent.api = NodeApi(of_client(ApiClient(node.plane.configuration())), node.name)
    status = agent.sample()
    (row,) = status.pods
    assert (row.uid, row.name, row.used_bytes) == (node.uid(mirror), mirror, GIB)
    assert status.devices[0].unattributed_bytes == 0
    assert states(status)["mirrors"] == "ok"
    (manifests / "still.yaml").unlink()
    node.wait(lambda: agent.sample().pods == [], "its end")


def test_permitted_labels_are_read_and_others_are_absent(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    node = start_node(gpus=1, replicas=2)
    agent = start_agent(node)
    labels = {
        "nvidia.com/gpu.sharing-strategy": "mps",
        "nvidia.com/gpu.replicas": "2",
        "nvidia.com/gpu.product": "H100-SHARED",
    }
    node.plane.call(
        "PATCH",
        f"/api/v1/nodes/{node.name}",
        {"metadata": {"labels": labels}},
        "application/merge-patch+json",
    )
    agent.api = NodeApi(of_client(ApiClient(node.plane.configuration())), node.name)
    status = agent.sample()
    sources = {source.name: source for source in status.sources}
    assert sources["labels"].state == "degraded"  # the plugin differs
    assert status.devices[0].sharing == "time-slicing"
    assert sources["configz"].state == "absent"  # this kubelet serves nothing
    agent.api = NodeApi(of_client(ApiClient(node.plane.configuration("wrong"))), node.name)
    rejected = {source.name: source for source in agent.sample().sources}
    assert rejected["labels"].message == "API server answers 401"


def command(agent: Agent, *flags: str) -> list[str]:
    kubelet, proc = agent.node.root, agent.proc
    return [
        *(sys.executable, "-m", "agent", "--json", *flags, "--proc", str(proc)),
        *("--checkpoint", f"{kubelet}/device-plugins/kubelet_internal_checkpoint"),
        *("--pod-resources", f"{kubelet}/pod-resources/kubelet.sock"),
    ]


def environment(node: Node) -> dict[str, str]:
    return os.environ | {
        "LD_LIBRARY_PATH": str(library_folder()),
        "FAKE_NVML_TABLE": str(node.driver.table),
        "PYTHONPATH": str(ROOT),
    }


def _without_starts(status: GPUNodeStatus) -> list[PodUse]:
    return [msgspec.structs.replace(each, started_at="") for each in status.pods]


def test_the_agent_s_process_reports_what_its_probes_see(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    node = start_node(gpus=2, replicas=2)
    agent = start_agent(node)
    for name in ("a", "b"):
        node.run(gpu_pod(name, containers=[gpu_container("main", takes_bytes=GIB)]))
    expected = agent.sample()
    done = subprocess.run(
        command(agent, "--once"),
        env=environment(node),
        capture_output=True,
        timeout=60,
        check=True,
    )
    printed = msgspec.json.decode(done.stdout, type=GPUNodeStatus)
    # Each process computes the time of a start from its own clock, so seconds are rounded apart.
    apart = [
        abs(datetime.fromisoformat(ours.started_at) - datetime.fromisoformat(theirs.started_at))
        for ours, theirs in zip(printed.pods, expected.pods, strict=True)
    ]
    assert max(apart) <= timedelta(seconds=1)
    assert _without_starts(printed) == _without_starts(expected)
    assert used(printed) == {"a": GIB, "b": GIB}
    assert printed.plugin == expected.plugin
    shown = [
        (d.uuid, d.resource, d.sharing, d.replicas, d.unattributed_bytes) for d in printed.devices
    ]
    assert shown == [
        (d.uuid, d.resource, d.sharing, d.replicas, d.unattributed_bytes) for d in expected.devices
    ]


def test_an_allocation_is_sampled_at_once_and_not_when_the_next_sample_is_due(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    node = start_node(gpus=1, replicas=2)
    agent = start_agent(node)
    agent.sample()
    flags = command(agent, "--interval", "3600", "--heartbeat", "3600")
    with subprocess.Popen(
        flags, env=environment(node), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stdout is not None
            first = msgspec.json.decode(process.stdout.readline(), type=GPUNodeStatus)
            assert first.pods == []
            node.admit(gpu_pod("a"))
            pods: list[str] = []
            while pods != ["a"]:
                ready, _, _ = select.select([process.stdout], [], [], 60.0)
                assert ready, "no sample within a minute of the allocation"
                line = process.stdout.readline()
                pods = [p.name for p in msgspec.json.decode(line, type=GPUNodeStatus).pods]
        finally:
            process.kill()
