"""Tests the stand-in alone: in memory, as files, and with every possible choice."""

import json
import random
from collections import Counter
from pathlib import Path

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.driver import Gpu
from tests.kubelet.pod_resources import podresources, podresources_services
from tests.standin.allocations import Pod
from tests.standin.checkpoint import NAME, checksum, render
from tests.standin.devices import DeviceManager, pod
from tests.standin.lots import Drawn
from tests.standin.node import StandIn
from tests.standin.plugin import Plugin, Settings, by_device
from tests.standin.possible import possible_devices, possible_placements
from tests.standin.real import decoded
from tests.standin.served import Served, write_checkpoint
from tests.standin.topology import TopologyPolicy

GPUS = [Gpu(f"GPU-{number}") for number in range(4)]


def manager(gpus: int, settings: Settings, *held: Pod) -> tuple[DeviceManager, list[str]]:
    """Return a device manager that holds these pods, and their uids."""
    node = DeviceManager()
    node.listed(Plugin(GPUS[:gpus], settings))
    active: list[str] = []
    for each in held:
        active.append(each.uid)
        assert node.admit(each, active, Drawn(random.Random(1))).admitted
    return node, active


# Possible devices of a pod.


def test_a_pod_may_get_any_device_of_a_tie() -> None:
    node, active = manager(3, Settings(2), pod("a", 1))
    (taken,) = possible_held(node, "a")
    assert possible_devices(node, pod("p", 1), active) == {"GPU-0", "GPU-1", "GPU-2"} - {taken}


def possible_held(node: DeviceManager, uid: str) -> set[str]:
    entry = node.given(uid, "main-0")
    assert entry is not None
    return {device for device, _ in by_device(entry.replicas)}


def test_an_unconfirmed_pod_that_may_be_admitted_first_makes_the_other_device_possible() -> None:
    node, active = manager(2, Settings(2), pod("a", 1))
    (taken,) = possible_held(node, "a")
    free = {"GPU-0", "GPU-1"} - {taken}
    assert possible_devices(node, pod("p", 1), active) == free
    both = possible_devices(node, pod("p", 1), active, unobserved=[pod("b", 1)])
    assert both == {"GPU-0", "GPU-1"}


def test_an_ending_pod_that_may_be_gone_makes_a_tie() -> None:
    node, active = manager(2, Settings(2), pod("a", 1))
    assert possible_devices(node, pod("p", 1), active, ending=["a"]) == {"GPU-0", "GPU-1"}


def test_a_container_reuses_the_replica_of_its_init_container() -> None:
    node, active = manager(2, Settings(2))
    placements = possible_placements(node, pod("p", 1, init=[1]), active)
    one, other = (("GPU-0", 1),), (("GPU-1", 1),)
    assert placements == {(one, one), (other, other)}


@pytest.mark.parametrize("seed", range(20))
def test_random_draws_give_exactly_the_possible_placements(seed: int) -> None:
    """Every draw is a possible placement, and enough draws give all of them."""
    lots = random.Random(seed)
    gpus = [Gpu(each.uuid, numa=lots.choice([0, 1])) for each in GPUS[:3]]
    policy: TopologyPolicy = lots.choice(["none", "best-effort", "restricted", "single-numa-node"])
    node = DeviceManager(policy, (0, 1))
    node.listed(Plugin(gpus, Settings(2)))
    active: list[str] = []
    for number in range(lots.randint(0, 3)):
        active.append(f"held-{number}")
        node.admit(pod(active[-1], 1), active, Drawn(lots))
    asked = pod("p", *lots.choice([(1,), (2,), (1, 1)]), init=lots.choice([(), (1,), (2,)]))
    possible = possible_placements(node, asked, active)
    seen = set()
    for draw in range(400):
        twin = node.copy()
        if twin.admit(asked, [*active, "p"], Drawn(random.Random(draw))).admitted:
            given = [twin.given("p", each.name) for each in asked.containers]
            seen.add(tuple(by_device(entry.replicas) if entry else () for entry in given))
    assert seen == possible


# Behaviour in memory.


class Machine(RuleBasedStateMachine):
    """Events in any order that a kubelet allows."""

    def __init__(self) -> None:
        super().__init__()
        self.node = StandIn(
            [Gpu(each.uuid, numa=n % 2) for n, each in enumerate(GPUS)], Settings(2)
        )
        self.count = 0

    @rule(replicas=st.lists(st.integers(0, 3), min_size=1, max_size=2), first=st.integers(0, 2))
    def admit(self, replicas: list[int], first: int) -> None:
        self.count += 1
        self.node.admit(pod(f"p{self.count}", *replicas, init=[first] if first else []))

    def _pick(self, data: st.DataObject) -> str | None:
        active = self.node.active
        return data.draw(st.sampled_from(active)) if active else None

    @rule(data=st.data(), frees=st.booleans())
    def end(self, data: st.DataObject, frees: bool) -> None:
        if uid := self._pick(data):
            self.node.end(uid, frees=frees)

    @rule(data=st.data())
    def force(self, data: st.DataObject) -> None:
        if uid := self._pick(data):
            self.node.force(uid)

    @rule(first=st.booleans())
    def restart_kubelet(self, first: bool) -> None:
        if self.node.plugin is not None:
            self.node.restart_kubelet(plugin_first=first)
            if not first:
                self.node.register_plugin()

    @rule(replica=st.sampled_from([f"GPU-{gpu}::{n}" for gpu in range(4) for n in range(2)]))
    def fail(self, replica: str) -> None:
        if self.node.plugin is not None:
            self.node.fail(replica)

    @rule()
    def lose_plugin(self) -> None:
        self.node.stop_plugin()
        self.node.start_plugin(Settings(2))

    @invariant()
    def no_replica_is_held_twice(self) -> None:
        """No replica is held twice, except by the containers of one pod in turn."""
        held: Counter[str] = Counter()
        for _, listed in self.node.pod_resources():
            replicas = [each.id for container in listed.values() for each in container]
            assert len(set(replicas)) == len(replicas)
            held.update(replicas)
        assert all(count == 1 for count in held.values())

    @invariant()
    def the_checkpoint_holds_the_last_write(self) -> None:
        written = self.node.devices.written
        assert written is not None
        given, healthy, _ = decoded(render(written))
        assert given.keys() == {(entry.uid, entry.container) for entry in written.entries}
        assert healthy == written.registered


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


# Behaviour through files and a socket.


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ('{"PodDeviceEntries":null,"RegisteredDevices":{}}', 3467439661),
        ('{"PodDeviceEntries":null,"RegisteredDevices":{"nvidia.com/gpu":[]}}', 3186271078),
        (
            '{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"main","ResourceName":'
            '"nvidia.com/gpu","DeviceIDs":{"-1":["GPU-0::1","GPU-0::0"],"10":["GPU-1::3"],"9":[]},'
            '"AllocResp":"CsgB"},{"PodUID":"v","ContainerName":"a","ResourceName":"b",'
            '"DeviceIDs":{"0":["x"]},"AllocResp":""}],"RegisteredDevices":{"a/b":null,'
            '"nvidia.com/gpu":["GPU-1::3","GPU-0::0"]}}',
            2340715548,
        ),
    ],
)
def test_the_checksum_equals_the_checksum_that_go_computes(data: str, expected: int) -> None:
    """The expected value was computed with go-spew and hash/fnv from the kubelet's types."""
    assert checksum(json.loads(data)) == expected


def test_an_agent_reads_the_checkpoint_and_the_socket_of_a_stand_in(tmp_path: Path) -> None:
    gpus = [Gpu("GPU-0", numa=0), Gpu("GPU-1", numa=1)]
    node = StandIn(gpus, Settings(2), save=lambda content: write_checkpoint(tmp_path, content))
    served = Served(node, tmp_path)
    try:
        node.admit(pod("p", 1, init=[1]))
        given, healthy, _ = decoded((tmp_path / "device-plugins" / NAME).read_bytes())
        assert given.keys() == {("p", "init-0"), ("p", "main-0")}
        assert len(healthy) == 4
        with grpc.insecure_channel(f"unix:{served.socket}") as channel:
            lister = podresources_services.PodResourcesListerStub(channel)
            (listed,) = lister.List(podresources.ListPodResourcesRequest()).pod_resources
            assert [each.name for each in listed.containers] == ["main-0"]
            (device,) = listed.containers[0].devices
            (replica,) = device.device_ids
            _, by_numa, environment = given["p", "main-0"]
            (numa,) = device.topology.nodes
            assert by_numa == {str(numa.ID): {replica}}
            assert environment == {"NVIDIA_VISIBLE_DEVICES": {replica.partition("::")[0]}}
            request = podresources.GetPodResourcesRequest(pod_name="p", pod_namespace="default")
            assert lister.Get(request).pod_resources == listed
            request = podresources.AllocatableResourcesRequest()
            assert len(lister.GetAllocatableResources(request).devices) == 4
            request = podresources.GetPodResourcesRequest(pod_name="q", pod_namespace="default")
            with pytest.raises(grpc.RpcError, match="pod q in namespace default not found"):
                lister.Get(request)
    finally:
        served.stop()
    assert not served.socket.exists()
