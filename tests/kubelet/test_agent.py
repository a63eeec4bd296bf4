"""Runs the agent's probes on real nodes, and compares the report with the kubelet, the plugin and
the runtime.
"""

import os
import select
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import yaml
from kubernetes.client import ApiClient

from agent.kube_client import of_client
from agent.probes.cgroup import is_static
from agent.probes.kubelet import KubeletProbe
from agent.probes.node_probe import NodeApi
from agent.probes.readings import (
    HoldingReading,
    SourceReading,
)
from headroom.contract.gpunode import GPUNodeStatus, PodUse
from tests.driver import AGENT_PATH, library_folder
from tests.kubelet.conftest import StartNode
from tests.kubelet.node import Node
from tests.kubelet.node_objects import RESOURCE, gpu_container, gpu_pod
from tests.kubelet.probed_node import (
    GIB,
    Agent,
    StartAgent,
    given,
    rows,
    start_agent,
    states,
    used,
)
from tests.waiting import PATIENCE_S

__all__ = ["start_agent"]


def test_each_container_of_a_pod_has_its_own_use_and_peaks(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    """The agent finds the names of the containers in the mounts that the kubelet requests from the
    runtime.
    """
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


def test_a_restarted_container_is_reported_as_a_new_run(
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


def test_the_report_shows_the_devices_and_use_of_every_container(
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


def test_an_unshared_device_and_the_topology_policy_are_reported(
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


def test_the_report_contains_the_data_of_the_only_readable_source(
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


def test_a_static_pod_is_reported_by_the_uid_of_its_mirror_pod(
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


def test_permitted_labels_are_reported_and_others_are_not(
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
    assert sources["labels"].state == "degraded"  # The labels differ from the plugin.
    assert status.devices[0].sharing == "time-slicing"
    assert sources["configz"].state == "absent"  # The kubelet in this test serves no API.
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
        "PYTHONPATH": AGENT_PATH,
    }


def _without_starts(status: GPUNodeStatus) -> list[PodUse]:
    return [msgspec.structs.replace(each, started_at="") for each in status.pods]


def test_the_agent_process_reports_the_same_as_its_probes(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    node = start_node(gpus=2, replicas=2)
    agent = start_agent(node)
    for name in ("a", "b"):
        node.run(gpu_pod(name, containers=[gpu_container("main", takes_bytes=GIB)]))
    began_s = time.monotonic()
    expected = agent.sample()
    done = subprocess.run(
        command(agent, "--once"),
        env=environment(node),
        capture_output=True,
        timeout=300,
        check=True,
    )
    printed = msgspec.json.decode(done.stdout, type=GPUNodeStatus)
    # The start times can differ by the duration of a sample and by rounding.
    sampled = timedelta(seconds=time.monotonic() - began_s)
    apart = [
        abs(datetime.fromisoformat(ours.started_at) - datetime.fromisoformat(theirs.started_at))
        for ours, theirs in zip(printed.pods, expected.pods, strict=True)
    ]
    assert max(apart) <= sampled + timedelta(seconds=1)
    assert _without_starts(printed) == _without_starts(expected)
    assert used(printed) == {"a": GIB, "b": GIB}
    assert printed.plugin == expected.plugin
    shown = [
        (d.uuid, d.resource, d.sharing, d.replicas, d.unattributed_bytes) for d in printed.devices
    ]
    assert shown == [
        (d.uuid, d.resource, d.sharing, d.replicas, d.unattributed_bytes) for d in expected.devices
    ]


def test_an_allocation_triggers_a_sample_before_the_next_one_is_due(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    node = start_node(gpus=1, replicas=2)
    agent = start_agent(node)
    agent.sample()
    never = [f"--{each}=3600" for each in ("interval", "heartbeat", "stale-after")]
    flags = command(agent, *never)
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
                ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
                assert ready, "no sample after the allocation"
                line = process.stdout.readline()
                pods = [p.name for p in msgspec.json.decode(line, type=GPUNodeStatus).pods]
        finally:
            process.kill()
