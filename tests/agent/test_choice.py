"""Tests which replicas a container gets on a steered node, for any pod."""

from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.gate_decision import Limits
from agent.probes.checkpoint import Entry
from agent.steering.choice import Choice, NoRoom, OnlyCordoned, choose
from agent.steering.messages import (
    ContainerRequest,
    allocated,
    container_requests,
    preferred,
    registration,
)
from headroom.contract.gpunode import (
    Charge,
    Device,
    GPUNodeSpec,
    GPUNodeStatus,
    Plugin,
    PodUse,
    Replicas,
    Reservation,
)

RESOURCE = "nvidia.com/gpu"
GIB = 1 << 30
NO_LIMITS = Limits(reserve_bytes=0, tolerance_bytes=0)


def gpu(name: str, gib: int = 24, **changes: Any) -> Device:
    fields = {
        "uuid": name,
        "memory_bytes": gib * GIB,
        "reserved_bytes": 0,
        "used_bytes": 0,
        "unattributed_bytes": 0,
        "sharing": "time-slicing",
        "resource": RESOURCE,
        "replicas": Replicas(free=4),
    }
    return Device(**(fields | changes))


def reservation(gib: int, *choices: str, count: int = 1) -> Reservation:
    candidates = dict.fromkeys(choices or ("GPU-0",), gib * GIB)
    return Reservation("default", "p", [Charge(RESOURCE, count, candidates, choices=list(choices))])


def free(*replicas: str) -> ContainerRequest:
    return ContainerRequest(replicas, (), 1)


def held(uid: str, replica: str) -> Entry:
    return Entry(uid, "main", RESOURCE, (replica,))


BOTH = free("GPU-0::0", "GPU-0::1", "GPU-1::0", "GPU-1::1")


@pytest.mark.parametrize("name", ["tegra", "all"])
def test_the_only_device_is_identified_by_the_plugins_name_for_it(name: str) -> None:
    """On Jetson and WSL there is only one device to choose, but the agent still checks memory."""
    only, entry = gpu("GPU-0"), held("old", f"{name}::0")
    request, new = free(f"{name}::1", f"{name}::2"), reservation(8, "GPU-0")
    before = {"old": reservation(16, "GPU-0")}
    assert answer(request, {"new": new, **before}, (entry,), (only,)) == Choice(())
    large = reservation(12, "GPU-0")
    assert answer(request, {"new": large, **before}, (entry,), (only,)) == NoRoom(12 * GIB)


def answer(
    requested: ContainerRequest,
    reservations: dict[str, Reservation],
    entries: tuple[Entry, ...] = (),
    devices: tuple[Device, ...] = (gpu("GPU-0"), gpu("GPU-1")),
    pods: tuple[PodUse, ...] = (),
    cordoned: tuple[str, ...] = (),
) -> Choice | NoRoom | OnlyCordoned:
    sample = GPUNodeStatus(devices=list(devices), pods=list(pods))
    spec = GPUNodeSpec(True, reservations, cordoned=list(cordoned))
    return choose(requested, RESOURCE, spec, sample, entries, NO_LIMITS)


def chosen(*args: Any, **kwargs: Any) -> str:
    found = answer(*args, **kwargs)
    assert isinstance(found, Choice)
    (device,) = found.devices
    return device


def test_a_pod_that_lost_its_device_is_not_unconfirmed() -> None:
    """The reservation of such a pod can remain for a moment, during which another device may be
    reserved for another pod.
    """
    spec = GPUNodeSpec(True, {"old": reservation(8, "GPU-0"), "new": reservation(8, "GPU-1")})
    sample = GPUNodeStatus(devices=[gpu("GPU-0"), gpu("GPU-1")])

    def device(*arrived: str) -> Choice | NoRoom | OnlyCordoned:
        return choose(BOTH, RESOURCE, spec, sample, (), NO_LIMITS, arrived_before={*arrived})

    ambiguous, certain = device(), device("old", "of another node")
    assert isinstance(ambiguous, Choice)
    assert ambiguous.reserved == frozenset()
    assert isinstance(certain, Choice)
    assert (certain.reserved, certain.devices) == ({"GPU-1"}, ("GPU-1",))
    # While the pod still holds a replica, it counts on the device and is not unconfirmed.
    holding = choose(
        BOTH, RESOURCE, spec, sample, (held("old", "GPU-0::9"),), NO_LIMITS, arrived_before={"old"}
    )
    assert isinstance(holding, Choice)
    assert holding.devices == ("GPU-1",)


def test_the_reserved_device_is_chosen_while_it_has_enough_memory() -> None:
    assert chosen(BOTH, {"p": reservation(8, "GPU-1")}) == "GPU-1"
    assert chosen(BOTH, {"p": reservation(8, "GPU-0")}) == "GPU-0"


def test_unconfirmed_pods_reserved_on_one_device_all_get_it() -> None:
    reservations = {
        "p": reservation(8, "GPU-1"),
        "q": reservation(12, "GPU-1"),
        "r": reservation(4, "GPU-1"),
    }
    assert chosen(BOTH, reservations) == "GPU-1"
    assert chosen(BOTH, reservations, (held("q", "GPU-1::2"),)) == "GPU-1"


def test_a_confirmed_pod_is_not_waited_for() -> None:
    reservations = {"old": reservation(8, "GPU-0"), "p": reservation(8, "GPU-1")}
    assert chosen(BOTH, reservations, (held("old", "GPU-0::2"),)) == "GPU-1"


def test_an_ended_pod_is_not_waited_for_although_its_reservation_remains() -> None:
    """The reservation of the ended pod names no device. The reservations of the unconfirmed pods
    name GPU-1.
    """
    reservations = {
        "ended": reservation(16),
        "p": reservation(12, "GPU-1"),
        "q": reservation(12, "GPU-1"),
    }
    pods = (PodUse(uid="ended", device="GPU-0", replica="GPU-0::0"),)
    assert chosen(BOTH, reservations, (held("ended", "GPU-0::0"),), pods=pods) == "GPU-1"
    assert chosen(BOTH, reservations) == "GPU-0"  # The pod may still be admitted.


def test_an_ended_pod_does_not_count_although_the_checkpoint_still_has_it() -> None:
    row = PodUse("gone", "GPU-1", replica="GPU-1::0", used_bytes=20 * GIB)
    reservations = {"gone": reservation(20, "GPU-1"), "p": reservation(20, "GPU-1")}
    assert chosen(BOTH, reservations, (held("gone", "GPU-1::0"),), pods=(row,)) == "GPU-1"


@pytest.mark.parametrize(
    ("devices", "entries", "requested"),
    [
        pytest.param((gpu("GPU-0"), gpu("GPU-1", healthy=False)), (), BOTH, id="it is unhealthy"),
        pytest.param(
            (gpu("GPU-0"), gpu("GPU-1", compute_mode="exclusive-process")),
            (),
            BOTH,
            id="its compute mode allows no other process to use it",
        ),
        pytest.param(
            (gpu("GPU-0"), gpu("GPU-1", unattributed_bytes=20 * GIB, used_bytes=20 * GIB)),
            (),
            BOTH,
            id="a process outside of all pods uses it",
        ),
        pytest.param(
            (gpu("GPU-0"), gpu("GPU-1", 12)),
            (held("stranger", "GPU-1::2"), held("another", "GPU-1::3")),
            BOTH,
            id="unattributed processes use it, each charged a replica's share",
        ),
        pytest.param(
            (gpu("GPU-0"), gpu("GPU-1")), (), free("GPU-0::1"), id="the kubelet does not offer it"
        ),
    ],
)
def test_another_device_is_chosen_under_these_conditions(
    devices: tuple[Device, ...], entries: tuple[Entry, ...], requested: ContainerRequest
) -> None:
    assert chosen(requested, {"p": reservation(8, "GPU-1")}, entries, devices) == "GPU-0"


def test_mig_devices_that_share_memory_are_full_together() -> None:
    parts = tuple(
        gpu(f"MIG-{i}", kind="mig", parent="GPU-0", gpu_instance=instance)
        for i, instance in enumerate((1, 1, 2))
    )
    requested = free("MIG-0::1", "MIG-1::0", "MIG-2::0")
    reservations = {"there": reservation(20, "MIG-0"), "p": reservation(8, "MIG-1")}
    assert chosen(requested, reservations, (held("there", "MIG-0::0"),), parts) == "MIG-2"


def test_a_pod_is_rejected_if_the_largest_unconfirmed_pod_fits_on_no_device() -> None:
    reservations = {"small": reservation(2, "GPU-1"), "large": reservation(16, "GPU-1")}
    full = tuple(gpu(f"GPU-{i}", unattributed_bytes=10 * GIB, used_bytes=10 * GIB) for i in (0, 1))
    assert answer(BOTH, reservations, devices=full) == NoRoom(16 * GIB)


def test_an_unreserved_pod_is_neither_rejected_nor_causes_rejections() -> None:
    huge = msgspec.structs.replace(reservation(40), flags=["adopted"])
    half = gpu("GPU-0", unattributed_bytes=12 * GIB, used_bytes=12 * GIB)
    devices = (half, gpu("GPU-1"))
    assert chosen(BOTH, {"s": huge}, devices=devices) == "GPU-1"
    assert chosen(BOTH, {"s": huge, "p": reservation(8, "GPU-0")}, devices=devices) == "GPU-0"
    assert answer(BOTH, {"s": huge, "p": reservation(30, "GPU-0")}) == NoRoom(30 * GIB)


def test_a_pod_reserved_without_a_choice_is_rejected_if_no_device_has_enough_memory() -> None:
    assert answer(BOTH, {"p": reservation(30)}) == NoRoom(30 * GIB)


@pytest.mark.parametrize(
    ("policy", "fuller", "device"),
    [
        ("distributed", "GPU-0", "GPU-1"),
        ("packed", "GPU-1", "GPU-0"),
        ("unknown", "GPU-0", "GPU-0"),
        ("unknown", "GPU-1", "GPU-1"),
    ],
)
def test_a_pod_without_a_reserved_device_gets_the_plugins_choice(
    policy: Literal["distributed", "packed", "unknown"], fuller: str, device: str
) -> None:
    """One device has 18 GiB of unattributed use, and GPU-0 has fewer free replicas."""
    used = {"used_bytes": 18 * GIB, "unattributed_bytes": 18 * GIB}
    devices = [gpu(name, **(used if name == fuller else {})) for name in ("GPU-0", "GPU-1")]
    sample = GPUNodeStatus(
        devices=devices,
        pods=[PodUse("s", "GPU-0", replica="GPU-0::0")],
        plugin=Plugin(allocation_policy=policy),
    )
    requested = free("GPU-0::1", *(f"GPU-1::{number}" for number in range(4)))

    def given(waiting: Reservation) -> str:
        spec = GPUNodeSpec(True, {"s": reservation(2, "GPU-0"), "p": waiting})
        found = choose(requested, RESOURCE, spec, sample, (held("s", "GPU-0::0"),), NO_LIMITS)
        assert isinstance(found, Choice)
        (device,) = found.devices
        return device

    assert given(reservation(4)) == device
    # The pod with a reserved device gets this device. If the device is full, the order of the pods
    # does not matter.
    assert {given(reservation(4, name)) for name in ("GPU-0", "GPU-1")} == {"GPU-0", "GPU-1"}
    assert given(reservation(12)) != fuller


def test_each_possible_device_of_differently_reserved_pods_has_memory_for_the_largest() -> None:
    # The extender would not make these reservations on a steered node. Such reservations can exist
    # from the time before the node was steered.
    reservations = {"p": reservation(20, "GPU-1"), "q": reservation(2)}
    assert chosen(BOTH, reservations, (held("other", "GPU-0::3"),)) == "GPU-1"


def test_before_steering_is_reported_only_earlier_reservations_get_their_device() -> None:
    sample = GPUNodeStatus(devices=[gpu("GPU-0"), gpu("GPU-1")])

    def unsaid(reservations: dict[str, Reservation]) -> Choice | NoRoom:
        spec = GPUNodeSpec(True, reservations)
        return choose(BOTH, RESOURCE, spec, sample, (), NO_LIMITS, steered=False)

    assert unsaid({}) == Choice(())
    assert unsaid({"p": reservation(8)}) == Choice(())
    found = unsaid({"p": reservation(8, "GPU-1")})
    assert isinstance(found, Choice)
    assert found.devices == ("GPU-1",)


def test_an_unattributed_process_gets_the_emptiest_device_and_always_memory() -> None:
    full = gpu("GPU-0", unattributed_bytes=20 * GIB, used_bytes=20 * GIB)
    assert chosen(BOTH, {}, devices=(full, gpu("GPU-1"))) == "GPU-1"
    assert chosen(free("GPU-0::0"), {}, devices=(full, gpu("GPU-1"))) == "GPU-0"


def test_memory_that_is_already_reserved_for_a_pod_on_its_device_counts_once() -> None:
    whole = {"p": reservation(24, "GPU-1", count=2)}
    assert chosen(BOTH, whole, (held("p", "GPU-1::2"),)) == "GPU-1"


class TestSeveralDevices:
    """Tests that a container that requests several replicas gets different devices."""

    GPUS = tuple(gpu(f"GPU-{i}") for i in range(4))
    REPLICAS = tuple(f"GPU-{i}::{n}" for i in range(4) for n in range(2))

    def given(
        self,
        size: int,
        reservations: dict[str, Reservation],
        *held_before: str,
        available: tuple[str, ...] = REPLICAS,
        **how: Any,
    ) -> set[str] | NoRoom | None:
        """Return the devices, or None if the plugin chooses."""
        asked = ContainerRequest((*available, *held_before), held_before, size)
        found = answer(asked, reservations, devices=self.GPUS, **how)
        if isinstance(found, NoRoom):
            return found
        assert isinstance(found, Choice)
        if not found.replicas:
            return None
        assert set(held_before) <= set(found.replicas)
        assert len(found.replicas) == size
        devices = [replica.split("::")[0] for replica in found.replicas]
        assert len(set(devices)) == size
        return set(devices)

    def test_they_are_those_of_the_reservation(self) -> None:
        wide = {"p": reservation(8, "GPU-1", "GPU-3", count=2)}
        assert self.given(2, wide) == {"GPU-1", "GPU-3"}
        assert self.given(1, wide) in ({"GPU-1"}, {"GPU-3"})
        two = {**wide, "q": reservation(16, "GPU-3", "GPU-1", count=2)}
        assert self.given(2, two) == {"GPU-1", "GPU-3"}

    def test_a_device_that_an_init_container_leaves_is_not_given_twice(self) -> None:
        wide = {"p": reservation(8, "GPU-1", "GPU-3", count=2)}
        assert self.given(2, wide, "GPU-1::9") == {"GPU-1", "GPU-3"}
        assert self.given(2, wide, "GPU-3::9") == {"GPU-1", "GPU-3"}

    def test_another_device_replaces_one_without_memory(self) -> None:
        wide = {"p": reservation(8, "GPU-0", "GPU-1", count=2), "s": reservation(20, "GPU-0")}
        stranger = (PodUse("s", "GPU-0", used_bytes=20 * GIB, replica="GPU-0::9"),)
        entries = (held("s", "GPU-0::9"),)
        found = self.given(2, wide, pods=stranger, entries=entries)
        assert isinstance(found, set)
        assert "GPU-1" in found
        assert "GPU-0" not in found

    def test_too_few_devices_with_memory_are_a_rejection(self) -> None:
        wide = {"p": reservation(8, "GPU-0", "GPU-1", count=2)}
        one = ("GPU-0::0", "GPU-0::1")
        assert self.given(2, wide, available=one) == NoRoom(8 * GIB)
        assert self.given(2, {"p": reservation(25, "GPU-0", "GPU-1", count=2)}) == NoRoom(25 * GIB)

    def test_a_pod_without_a_reservation_gets_the_emptiest_devices(self) -> None:
        full = {"s": reservation(20, "GPU-2"), "t": reservation(16, "GPU-0")}
        rows = (
            PodUse("s", "GPU-2", used_bytes=0, replica="GPU-2::9"),
            PodUse("t", "GPU-0", used_bytes=0, replica="GPU-0::9"),
        )
        entries = held("s", "GPU-2::9"), held("t", "GPU-0::9")
        assert self.given(2, full, pods=rows, entries=entries) == {"GPU-1", "GPU-3"}

    def test_a_reservation_for_the_plugins_choice_gets_different_devices_if_possible(self) -> None:
        predicted = {"p": reservation(8, count=2)}
        found = self.given(2, predicted)
        assert isinstance(found, set)
        # This reservation allows two replicas of one device.
        assert self.given(2, predicted, available=("GPU-0::0", "GPU-0::1")) is None


SIZES = st.integers(1, 24)


@given(
    sizes=st.lists(SIZES, min_size=1, max_size=6),
    outsiders=st.lists(st.sampled_from(["GPU-0", "GPU-1", "GPU-2"]), max_size=6),
    order=st.randoms(use_true_random=False),
    wanted=st.sampled_from(["GPU-0", "GPU-1", "GPU-2"]),
)
def test_no_order_of_pods_assigns_more_memory_than_a_device_has(
    sizes: list[int], outsiders: list[str], order: Any, wanted: str
) -> None:
    """This must hold for any containers and any reservations, even if the reservations are
    outdated.
    """
    devices = tuple(gpu(f"GPU-{i}", replicas=Replicas(free=8)) for i in range(3))
    left = {device.uuid: [f"{device.uuid}::{n}" for n in range(8)] for device in devices}
    entries = [held(f"s{n}", left[uuid].pop()) for n, uuid in enumerate(outsiders)]
    taken = {uuid: outsiders.count(uuid) * 3 for uuid in left}  # The share of a replica is 3 GiB.
    reservations = {f"p{n}": reservation(gib, wanted) for n, gib in enumerate(sizes)}
    arriving = [*reservations]
    order.shuffle(arriving)
    for uid in arriving:
        found = answer(
            free(*(r for some in left.values() for r in some)),
            reservations,
            tuple(entries),
            devices,
        )
        if isinstance(found, NoRoom):
            del reservations[uid]  # The pod has failed.
            continue
        (replica,) = found.replicas
        (device,) = found.devices
        left[device].remove(replica)
        entries.append(held(uid, replica))
        taken[device] += sizes[int(uid[1:])]
    assert all(gib <= 24 or gib == outsiders.count(uuid) * 3 for uuid, gib in taken.items())


def test_messages_are_valid_in_the_device_plugin_api() -> None:
    import grpc

    api, _ = grpc.protos_and_services("tests/kubelet/deviceplugin.proto")
    request = api.PreferredAllocationRequest(
        container_requests=[
            {
                "available_deviceIDs": ["a::0", "b::0"],
                "must_include_deviceIDs": ["a::0"],
                "allocation_size": 300,
            }
        ]
    )
    assert container_requests(request.SerializeToString()) == [
        ContainerRequest(("a::0", "b::0"), ("a::0",), 300)
    ]
    response = api.PreferredAllocationResponse.FromString(preferred([["a::0"], ["b::0", "b::1"]]))
    assert [list(each.deviceIDs) for each in response.container_responses] == [
        ["a::0"],
        ["b::0", "b::1"],
    ]
    given_ids = api.AllocateRequest(container_requests=[{"devices_ids": ["a::0", "b::1"]}])
    assert allocated(given_ids.SerializeToString()) == ["a::0", "b::1"]
    options = api.DevicePluginOptions(get_preferred_allocation_available=True)
    register = api.RegisterRequest.FromString(
        registration("x" * 200, RESOURCE, options.SerializeToString())
    )
    assert (register.version, register.endpoint, register.resource_name) == (
        "v1beta1",
        "x" * 200,
        RESOURCE,
    )
    assert register.options == options


class TestCordonedDevices:
    """Tests that the cordoned GPU-1 takes no new pods of any scheduler."""

    CORDON = ("GPU-1",)

    def test_a_pod_whose_reserved_device_lacks_memory_is_rejected(self) -> None:
        overuse = (PodUse("o", "GPU-0", replica="GPU-0::9", used_bytes=20 * GIB),)
        reservations = {"o": reservation(8, "GPU-0"), "p": reservation(8, "GPU-0")}
        assert chosen(BOTH, reservations, pods=overuse) == "GPU-1"
        rejected = answer(BOTH, reservations, pods=overuse, cordoned=self.CORDON)
        assert rejected == NoRoom(8 * GIB)

    def test_a_pod_of_another_scheduler_gets_another_device(self) -> None:
        used = (PodUse("o", "GPU-0", replica="GPU-0::9", used_bytes=8 * GIB),)
        reservations = {"o": reservation(8, "GPU-0")}
        assert chosen(BOTH, reservations, pods=used) == "GPU-1"
        assert chosen(BOTH, reservations, pods=used, cordoned=self.CORDON) == "GPU-0"

    def test_a_pod_of_another_scheduler_is_rejected_if_only_cordoned_devices_are_free(self) -> None:
        only = free("GPU-1::0", "GPU-1::1")
        assert chosen(only, {}) == "GPU-1"
        assert answer(only, {}, cordoned=self.CORDON) == OnlyCordoned()

    def test_an_adopted_pod_counts_as_a_new_pod_there(self) -> None:
        adopted = {"p": msgspec.structs.replace(reservation(8, "GPU-1"), flags=["adopted"])}
        assert chosen(BOTH, adopted, cordoned=self.CORDON) == "GPU-0"
        assert answer(free("GPU-1::0"), adopted, cordoned=self.CORDON) == OnlyCordoned()

    def test_a_pod_placed_before_the_cordon_starts_there(self) -> None:
        assert chosen(BOTH, {"p": reservation(8, "GPU-1")}, cordoned=self.CORDON) == "GPU-1"

    def test_the_plugins_choice_among_several_devices_excludes_it(self) -> None:
        across = ContainerRequest((*BOTH.available, "GPU-2::0"), (), 2)
        two = (gpu("GPU-0"), gpu("GPU-1"), gpu("GPU-2"))
        wide = ContainerRequest(("GPU-0::0", "GPU-1::0", "GPU-2::0"), (), 2)
        for asked in (wide, across):
            got = answer(asked, {}, devices=two, cordoned=self.CORDON)
            assert isinstance(got, Choice)
            assert set(got.devices) == {"GPU-0", "GPU-2"}
        every = ContainerRequest(wide.available, (), 3)
        assert answer(every, {}, devices=two, cordoned=self.CORDON) == OnlyCordoned()
        # Only replicas of one device are free.
        same = ContainerRequest(BOTH.available, (), 2)
        got = answer(same, {}, devices=two, cordoned=self.CORDON)
        assert got == Choice(("GPU-0::0", "GPU-0::1"))

    def test_the_cordon_of_a_gpu_covers_its_mig_devices(self) -> None:
        shares = (gpu("MIG-0", parent="GPU-0"), gpu("MIG-1", parent="GPU-1"))
        both = free("MIG-0::0", "MIG-1::0")
        assert chosen(both, {}, devices=shares) == "MIG-1"
        assert chosen(both, {}, devices=shares, cordoned=self.CORDON) == "MIG-0"
