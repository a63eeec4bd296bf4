"""Compares the stand-in with a real kubelet and NVIDIA's real plugin, call by call.

After each operation, the plugin's calls, the verdict, the checkpoint and every response of
PodResources are equal. Where the real components choose at random, the stand-in repeats their
choice if it is among its own possible choices.
"""

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest

from tests.controlplane import ApiRefused
from tests.kubelet.conftest import StartNode
from tests.kubelet.node import Node
from tests.kubelet.pod_resources import podresources, podresources_services
from tests.standin.allocations import Container
from tests.standin.checkpoint import render
from tests.standin.node import StandIn
from tests.standin.plugin import Settings, device_of
from tests.standin.real import Fed, Real, decoded
from tests.standin.served import PodResources
from tests.standin.topology import TopologyPolicy

Answers = list[Any]
#: Errors of the kubelet's PodResources that have no meaning.
TRANSIENT = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNKNOWN)
STEPS = 13


class Pair:
    """The stand-in and the real node. Every operation is done on the real node first."""

    def __init__(self, node: Node, settings: Settings, topology: TopologyPolicy = "none") -> None:
        self.node = node
        self.model = StandIn(node.driver.gpus, settings, topology=topology)
        self.real = Real(node)
        #: Devices with an unhealthy replica.
        self.unhealthy: set[str] = set()
        self.compare()

    def admit(self, name: str, *containers: Container) -> str | None:
        """Admit a pod and return its uid, or None if it was rejected."""
        pod, verdict = self.real.admit(name, containers)
        recorded = self.real.taken()
        calls = self.model.devices.calls
        calls.clear()
        assert self.model.admit(pod, Fed(recorded, calls)) == verdict
        assert calls == [each.call for each in recorded]
        if not verdict.admitted:
            # A kubelet that restarts before it has written the rejection to the API server would
            # admit the pod again.
            self.real.force(pod.uid)
            self.model.force(pod.uid)
        self.compare()
        return pod.uid if verdict.admitted else None

    def end(self, uid: str) -> None:
        self.real.end(uid)
        self.model.end(uid)
        self.compare()

    def delete(self, uid: str) -> None:
        self.real.delete(uid)
        self.model.delete(uid)
        self.compare()

    def force(self, uid: str) -> None:
        self.real.force(uid)
        self.model.force(uid)
        self.compare()

    def fail(self, device: str) -> None:
        if device not in self.unhealthy:
            replica = self.real.fail(device)
            assert device_of(replica) == device
            self.model.fail(replica)
            self.unhealthy.add(device)
            self.compare()

    def restart_kubelet(self, *, hold_plugin: bool) -> bool:
        """Restart the kubelet. Return whether the plugin was back before the kubelet saw its
        pods.
        """
        for uid in self.model.active:
            self.real.runs(uid)
        plugin_first = self.real.restart_kubelet(hold_plugin=hold_plugin)
        self.model.restart_kubelet(plugin_first=plugin_first)
        if hold_plugin:
            self.compare()
            self.real.resume_plugin()
        if not plugin_first:
            self.model.register_plugin()
        assert self.real.taken() == []
        self.unhealthy = set()
        self.compare()
        return plugin_first

    def restart_plugin(self, settings: Settings) -> None:
        self.real.restart_plugin(settings)
        self.model.stop_plugin()
        self.model.start_plugin(settings)
        self.unhealthy = set()
        self.compare()

    def compare(self) -> None:
        try:  # The kubelet lists pods with a short delay.
            self.node.wait(lambda: self._really() == self._modelled(), "the same answers")
        except AssertionError:
            assert self._really() == self._modelled()
            raise
        written = self.model.devices.written
        assert written is not None
        assert decoded(render(written)) == self.real.checkpoint()

    def _really(self) -> Answers | None:
        """Return the kubelet's responses, or None if it was called too often or a pod was just
        deleted.
        """
        with grpc.insecure_channel(f"unix:{self.node.root}/pod-resources/kubelet.sock") as channel:
            try:
                return answers(podresources_services.PodResourcesListerStub(channel), 10.0)
            except grpc.RpcError as rejected:
                if rejected.code() not in TRANSIENT:
                    raise
                return None

    def _modelled(self) -> Answers:
        return answers(PodResources(self.model), None)


@contextlib.contextmanager
def pair_of(node: Node, *how: Any) -> Iterator[Pair]:
    pair = Pair(node, *how)
    try:
        yield pair
    finally:
        pair.real.close()


def answers(lister: Any, timeout_s: float | None) -> Answers:
    """Return all responses: List, then Get for every pod, and the allocatable replicas."""
    listed = lister.List(podresources.ListPodResourcesRequest(), timeout_s).pod_resources
    got = [
        lister.Get(
            podresources.GetPodResourcesRequest(pod_name=each.name, pod_namespace=each.namespace),
            timeout_s,
        ).pod_resources
        for each in listed
    ]
    request = podresources.AllocatableResourcesRequest()
    allocatable = lister.GetAllocatableResources(request, timeout_s).devices
    return [{told(each) for each in listed}, {told(each) for each in got}, devices(allocatable)]


def told(pod: Any) -> tuple[object, ...]:
    held = tuple((each.name, devices(each.devices)) for each in pod.containers)
    return pod.namespace, pod.name, held


def devices(told: Any) -> frozenset[object]:
    whole = [
        (each.resource_name, tuple(each.device_ids), tuple(n.ID for n in each.topology.nodes))
        for each in told
    ]
    assert len(set(whole)) == len(whole)
    return frozenset(whole)


#: Relative frequency of each operation.
OPERATIONS = {"admit": 12, "end": 2, "delete": 2, "force": 2, "fail": 1, "kubelet": 1, "plugin": 1}


def play(pair: Pair, seed: int) -> None:
    """Execute operations drawn with the seed."""
    lots = random.Random(seed)
    for step in range(STEPS):
        uids = pair.model.active
        operation = lots.choices([*OPERATIONS], weights=[*OPERATIONS.values()])[0]
        if not uids or operation == "admit":
            pair.admit(f"p{step}-{pair.node.name}", *containers(lots))
            continue
        match operation:
            case "fail":
                pair.fail(lots.choice(pair.node.driver.gpus).uuid)
            case "kubelet":
                pair.restart_kubelet(hold_plugin=lots.random() < 0.5)
            case "plugin":
                replicas = lots.choice([1, 2, 3, 4])
                greedy = replicas > 1 and lots.random() < 0.3
                pair.restart_plugin(Settings(replicas, fail_requests_greater_than_one=greedy))
            case _:
                getattr(pair, operation)(lots.choice(uids))


def containers(lots: random.Random) -> list[Container]:
    first = [
        Container(f"init-{n}", lots.choice([1, 1, 2]), init=True, sidecar=lots.random() < 0.3)
        for n in range(lots.choice([0, 0, 0, 0, 1, 2]))
    ]
    return first + [
        Container(f"main-{n}", lots.choice([0, 1, 1, 1, 1, 1, 1, 2, 2, 3]))
        for n in range(lots.choice([1, 1, 1, 2]))
    ]


@pytest.mark.parametrize(
    ("seed", "topology", "numa", "replicas"),
    [
        pytest.param(1, "none", (1, 0, 1, 0), 3, id="no policy"),
        pytest.param(2, "best-effort", (1, 0, 1, 0), 2, id="best-effort"),
        pytest.param(3, "restricted", (0, 0, 1, None), 2, id="restricted"),
        pytest.param(4, "single-numa-node", (0, 0, 1, 2), 2, id="single-numa-node"),
        pytest.param(5, "best-effort", (0, 1, 1, 2), 1, id="unshared"),
    ],
)
def test_the_stand_in_behaves_like_the_real_node(
    start_node: StartNode,
    seed: int,
    topology: TopologyPolicy,
    numa: Sequence[int | None],
    replicas: int,
) -> None:
    node = start_node(gpus=len(numa), replicas=replicas, numa=numa, topologyManagerPolicy=topology)
    with pair_of(node, Settings(replicas), topology) as pair:
        play(pair, seed)


def one(count: int = 1) -> Container:
    return Container("main", count)


@pytest.mark.parametrize(
    ("topology", "admitted"), [("best-effort", True), ("restricted", False)], ids=str
)
def test_the_topology_policy_decides_about_a_pod_with_replicas_on_two_numa_nodes(
    start_node: StartNode, topology: TopologyPolicy, admitted: bool
) -> None:
    node = start_node(gpus=2, replicas=2, numa=(0, 1), topologyManagerPolicy=topology)
    with pair_of(node, Settings(2), topology) as pair:
        first, *_ = [pair.admit(f"{name}-{node.name}", one()) for name in "abc"]
        assert first
        pair.force(first)
        # On an empty node, one of its NUMA nodes could have given both replicas.
        assert bool(pair.admit(f"d-{node.name}", one(2))) == admitted


def test_a_kubelet_restarts_before_the_plugin_is_back(start_node: StartNode) -> None:
    node = start_node(gpus=2, replicas=2)
    with pair_of(node, Settings(2)) as pair:
        # The new kubelet ends a running pod because its init container has ended, but not a pod
        # whose containers run.
        killed = pair.admit("a", Container("first", 1, init=True), one())
        kept = pair.admit("b", one())
        assert killed
        assert kept
        pair.fail("GPU-0")
        pair.restart_kubelet(hold_plugin=True)
        assert pair.model.active == [kept]
        verdict = pair.model.pods[killed].verdict
        assert verdict is not None
        assert "no healthy devices present" in verdict.message
        # The restarted plugin reports the replica as healthy, because it has forgotten the failure.
        assert pair.model.devices.capacity == (4, 4)


def test_the_plugin_restarts_with_other_settings(start_node: StartNode) -> None:
    node = start_node(gpus=2, replicas=2)
    with pair_of(node, Settings(2)) as pair:
        assert pair.admit("a", one())
        assert pair.admit("b", one())
        # With sharing disabled, the plugin gives away devices of running pods.
        pair.restart_plugin(Settings(1))
        assert pair.admit("c", one(2))
        pair.restart_plugin(Settings(2, fail_requests_greater_than_one=True))
        active = pair.model.active
        assert pair.admit("d", one(2)) is None
        assert pair.model.active == active


_ADMISSION = "/apis/admissionregistration.k8s.io/v1"
POLICIES = f"{_ADMISSION}/validatingadmissionpolicies"
BINDINGS = f"{_ADMISSION}/validatingadmissionpolicybindings"


@contextlib.contextmanager
def without_status(node: Node, pod: str) -> Iterator[None]:
    """Make the API server reject all writes of the pod's status."""
    plane, name = node.plane, f"without-status-{pod}"
    # A test ConfigMap shows when the API server applies the policy.
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods/status", "configmaps"]}
    spec = {
        "matchConstraints": {"resourceRules": [rule | {"operations": ["CREATE", "UPDATE"]}]},
        "validations": [{"expression": f"object.metadata.name != '{pod}'"}],
    }
    binding = {"policyName": name, "validationActions": ["Deny"]}
    plane.call("POST", POLICIES, {"metadata": {"name": name}, "spec": spec})
    plane.call("POST", BINDINGS, {"metadata": {"name": name}, "spec": binding})

    def applied() -> bool:
        path = "/api/v1/namespaces/default/configmaps?dryRun=All"
        try:
            plane.call("POST", path, {"metadata": {"name": pod}})
        except ApiRefused as err:
            return name in str(err)
        return False

    try:
        node.wait(applied, f"the policy {name}")
        yield
    finally:
        plane.call("DELETE", f"{POLICIES}/{name}")
        plane.call("DELETE", f"{BINDINGS}/{name}")


def test_a_new_kubelet_admits_a_pod_that_the_previous_kubelet_rejected(
    start_node: StartNode,
) -> None:
    """Only the kubelet has the rejection for up to ten seconds. Here the API server does not get it
    until the test ends.
    """
    node = start_node(gpus=1, replicas=2)
    late_name = f"late-{node.name}"
    with pair_of(node, Settings(2)) as pair, without_status(node, late_name):
        holder = pair.admit("a", one(2))
        assert holder
        late, verdict = pair.real.admit(late_name, [one()])
        assert pair.model.admit(late, Fed([], [])) == verdict
        assert not verdict.admitted
        pair.delete(holder)
        other = pair.admit("b", one())  # Only now the checkpoint loses the previous holder.
        assert other
        assert node.status(late.name)["phase"] == "Pending"
        pair.model.pods[late.uid].told = False
        plugin_first = pair.restart_kubelet(hold_plugin=False)
        assert (late.uid in pair.model.active) == plugin_first
