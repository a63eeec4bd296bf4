"""Tests that requested amounts are converted to bytes on a device exactly and without overflow."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.contract.annotations import Amount, Bytes, ReplicaShare, Share
from headroom.contract.gpunode import Device, Replicas
from headroom.contract.kube import Container
from headroom.core.placement.amounts import bytes_of, device_arrays, needed
from headroom.core.placement.request import Ask, Portion
from tests.builders import GIB, container, device, mig, pod, request, shared

PPM = 1_000_000
MAX_DEVICE_BYTES = 1 << 44
TOO_MUCH_BYTES = 1 << 52
MOST_BYTES = 1 << 61


def on(amount: Amount, of: Device, count: int = 1) -> int:
    return int(bytes_of(amount, count, device_arrays([of], 0))[0])


def need(of: Device, vram: str | None, *containers: Container, **other: Device) -> int:
    asks = request(pod(vram, *containers)).asks
    return int(needed(asks[0], asks, device_arrays([of, *other.values()], 0))[0])


@given(st.integers(1, MAX_DEVICE_BYTES), st.integers(1, PPM))
def test_a_share_is_exact_and_rounded_down(memory: int, ppm: int) -> None:
    exact = Fraction(memory) * ppm / PPM
    assert on(Share(ppm), device(memory_bytes=memory)) == max(1, int(exact))


@given(st.integers(1, MAX_DEVICE_BYTES), st.integers(1, 1024))
def test_a_request_for_replicas_never_exceeds_the_device(memory: int, replicas: int) -> None:
    one = on(ReplicaShare(), shared(memory_bytes=memory, free=replicas))
    assert one == max(1, memory // replicas)


def test_a_share_of_a_fully_reserved_device_is_at_least_one_byte() -> None:
    used_up = device(reserved_bytes=24 * GIB)
    assert on(Share(1), used_up) == on(ReplicaShare(), used_up) == 1


def test_replicas_of_one_device_add_up_to_at_most_the_device() -> None:
    assert on(ReplicaShare(), shared(free=4), count=2) == 12 * GIB
    assert on(ReplicaShare(), shared(free=4), count=60) == 24 * GIB
    assert on(ReplicaShare(), device(), count=2) == 24 * GIB


def test_on_a_shared_device_all_containers_add_up() -> None:
    containers = container("a"), container("b")
    assert need(shared(), "a=8Gi,b=2Gi", *containers) == 10 * GIB
    assert need(device(), "a=8Gi,b=2Gi", *containers) == 8 * GIB


def test_a_container_can_get_all_instances_that_share_a_memory() -> None:
    other = mig("M1", 1)
    assert need(mig("M0", 1), "2Gi", container(gpus=2), other=other) == 4 * GIB
    assert need(mig("M0", 1), "2Gi", container(gpus=3), other=other) == 4 * GIB
    assert need(mig("M0", 2), "2Gi", container(gpus=2), other=other) == 2 * GIB


def test_instances_of_another_resource_count_in_shared_memory() -> None:
    other = mig("M1", 1, resource="nvidia.com/mig-2c")
    containers = container("a"), container("b", resource="nvidia.com/mig-2c")
    assert need(mig("M0", 1), "a=2Gi,b=3Gi", *containers, other=other) == 5 * GIB
    assert need(mig("M0", 2), "a=2Gi,b=3Gi", *containers, other=other) == 2 * GIB


@pytest.mark.parametrize("of", [shared(), device(), mig("M0", 1)])
def test_a_sum_that_overflows_stays_too_large(of: Device) -> None:
    most = Portion(Bytes(MAX_DEVICE_BYTES), 1 << 16)
    many = Ask(of.resource, 1 << 28, 1 << 16, ((most,) * (1 << 12),))
    assert needed(many, (many,), device_arrays([of], 0))[0] >= MAX_DEVICE_BYTES
    at = device_arrays([mig(f"M{i}", 1) for i in range(256)], 0)
    assert needed(many, (many,), at).min() == TOO_MUCH_BYTES
    others = (Ask(f"r{i}", 1 << 16, 1 << 16, ((most,),)) for i in range(1 << 12))
    assert needed(many, (many, *others), at).min() == MOST_BYTES


def test_a_share_of_a_device_with_contradictory_figures_is_unknown() -> None:
    absurd = device(memory_bytes=1 << 90, replicas=Replicas(free=1 << 90))
    assert on(Share(PPM), absurd) == on(ReplicaShare(), absurd) == MAX_DEVICE_BYTES
    assert on(Bytes(GIB), absurd) == GIB
