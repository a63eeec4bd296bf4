"""Checks that no gated pod starts on a device without enough memory, after any sequence of events.

Both the node and the judge are stand-ins: the judge counts what the node's processes hold or may
still allocate, because they requested it. Ledger, eviction and gate are real, over a store in
memory. Between binding and admission, everything of DESIGN section 5 happens: replicas are released
or turn unhealthy, bound pods are deleted before admission, pods of other schedulers are admitted
first, the plugin restarts with another policy. Pods are admitted in any order, reports are late,
and the gate may use an outdated copy of the ledger.
"""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import settings

from tests.examples import examples
from tests.standin.gated import NAME, Gated


@pytest.fixture
def world() -> Gated:
    """A node whose device 0 has 3 GiB free and device 1 has 12 GiB, where the next pod is
    predicted.
    """
    world = Gated()
    world.start(gpus=2, policy="distributed")
    world.sit(9, "GPU-0")
    return world


Deed = Callable[[Gated], None]


def two_pods_on_the_device_end(world: Gated) -> None:
    for uid in world.extra:
        world.one_goes(uid)


def replicas_turn_unhealthy(world: Gated) -> None:
    for number in range(2):
        world.node.fail(f"GPU-1::{number}")


def a_pod_that_bypasses_us_is_admitted_first(world: Gated) -> None:
    world.another_scheduler_binds_a_pod(size=3, gated=False)
    world.admit(max(world.coming))


def the_plugin_restarts_with_another_policy(world: Gated) -> None:
    world.the_plugin_restarts("packed")


SURPRISES: Sequence[tuple[Deed, tuple[str, ...]]] = (
    (two_pods_on_the_device_end, ("GPU-0", "GPU-0", "GPU-1", "GPU-1")),
    (replicas_turn_unhealthy, ()),
    (a_pod_that_bypasses_us_is_admitted_first, ("GPU-0",)),
    (the_plugin_restarts_with_another_policy, ()),
)


@pytest.mark.parametrize(
    ("surprise", "sit"), [pytest.param(*each, id=each[0].__name__) for each in SURPRISES]
)
def test_a_pod_admitted_to_a_full_device_is_evicted_before_it_starts(
    world: Gated, surprise: Deed, sit: Sequence[str]
) -> None:
    for device in sit:
        uid = world.sit(1, device)
        if device == "GPU-0":
            world.extra.append(uid)
    world.report()
    world.we_bind_a_pod(size=10)
    (uid,) = world.coming
    surprise(world)
    world.admit(uid)
    others = [each for each in world.node.pods if world.device(each) == world.device(uid)]
    assert sum(world.sizes[each] for each in others) > 12, "it was no surprise"
    for _ in range(3):
        world.report()
        world.read = world.gpunode()
        world.ask(uid)
        assert uid not in world.begun
        world.housekeeping(twice=True)
    assert uid not in world.node.pods
    assert world.evicted == 1
    assert world.state.cluster.backs_off(NAME)
    assert uid not in world.gpunode().spec.reservations


def test_a_pod_that_is_deleted_before_admission_causes_no_miss(world: Gated) -> None:
    """The prediction considers every subset of the unconfirmed pods."""
    world.we_bind_a_pod(size=1)
    (first,) = world.coming
    world.we_bind_a_pod(size=2)
    world.one_deleted(first)
    for uid in list(world.coming):
        world.admit(uid)
    world.report()
    world.read = world.gpunode()
    for uid in world.waiting():
        world.ask(uid)
    assert not world.waiting()
    assert world.evicted == 0


TestGated = Gated.TestCase
TestGated.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
