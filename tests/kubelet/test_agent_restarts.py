"""Runs the agent's probes on real nodes while the kubelet, the plugin and pods restart, end or
change.
"""

import grpc
import pytest
import yaml

from tests.kubelet.conftest import StartNode
from tests.kubelet.node_objects import RESOURCE, gpu_container, gpu_pod
from tests.kubelet.probed_node import GIB, StartAgent, by_uuid, rows, start_agent, states, used
from tests.kubernetes_version import is_at_least

__all__ = ["start_agent"]


def test_a_restart_of_the_kubelet_keeps_all_pods_in_the_report(
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
        """Return whether a sample equals the sample before. Retry, because the kubelet may forget
        the plugin late.
        """
        now = agent.sample()
        assert rows(now) == rows(before)
        same = [d.replicas for d in now.devices] == [d.replicas for d in before.devices]
        return same and now.sources == before.sources

    node.wait(as_before, "the same sources and replicas as before")


def test_pods_stay_in_the_report_until_a_restarted_kubelet_lists_its_pods(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    """A restarted kubelet lists no pods while it cannot reach the API server."""
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


def test_an_ended_pod_leaves_the_report_although_the_checkpoint_still_contains_it(
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
    # The agent calls only List, because Get returns the same pods.
    if is_at_least("1.34"):  # In older versions, List also returns ended pods, and Get is alpha.
        listed = node.listed()
        assert listed.keys() == {"b"}
        assert node.got("b") == listed["b"]
    if is_at_least("1.35"):  # In older versions, Get also returns ended pods.
        with pytest.raises(grpc.RpcError, match="pod a in namespace default not found"):
            node.got("a")


def test_a_force_deleted_pod_is_reported_while_its_process_runs_and_separately_from_its_successor(
    start_node: StartNode, start_agent: StartAgent
) -> None:
    node = start_node(gpus=1, replicas=2)
    agent = start_agent(node)
    stubborn = gpu_container("main", "stubborn", takes_bytes=3 * GIB)
    node.run(gpu_pod("p", terminationGracePeriodSeconds=600, containers=[stubborn]))
    old, runs_on = node.uid("p"), node.runtime.running("p")["main"]
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
    node.runtime.exit(runs_on, 137)
    node.wait(lambda: old not in shown(), "the end of the old container")


def test_replicas_dropped_by_a_reconfigured_plugin_are_still_reported(
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
    assert complaint == f"a pod holds {RESOURCE} that the plugin no longer advertises"


def test_a_renamed_resource_is_reported_together_with_pods_under_the_old_name(
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


def test_unhealthy_replicas_and_replicas_of_a_missing_plugin_are_not_free(
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
