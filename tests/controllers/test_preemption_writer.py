"""Tests that preemption for a pod runs one attempt at a time, and evicts no pod if a budget
protects a victim.
"""

from collections.abc import Callable

import msgspec
import pytest

from extender.ledger.embedded_store import EmbeddedStore
from extender.preemption.writer import PreemptionResult, PreemptionWriter
from headroom.contract.annotations import PREEMPTING
from headroom.contract.kube import Pod
from headroom.contract.preemption import attempt_of
from headroom.errors import OutcomeUnknown, StoreConflict, StoreRejected
from tests.blocking import now
from tests.builders import pod
from tests.world import World

NEW = pod(uid="new", name="new", priority=9)


class Writer(World):
    """A cluster with a pending pod and two victims on a node."""

    def __init__(self) -> None:
        super().__init__()
        self.store.admit(NEW)
        for name in ("high", "low"):
            self.store.admit(victim(name))
        self.made = 0

    def preempt(self, seen: Pod | None = None) -> PreemptionResult:
        self.made += 1
        ids = f"id-{self.made}"
        writer = PreemptionWriter(self.async_store, self.evictor, lambda: 5.0, lambda: ids)
        victims = [victim(name) for name in ("high", "low")]
        return now(writer.preempt(seen or self.pod("new"), "n", victims))


def victim(name: str) -> Pod:
    return pod(uid=name, name=name, node="n", phase="Running")


def names(pods: tuple[Pod, ...]) -> list[str]:
    return [pod.metadata.name for pod in pods]


def test_the_attempt_is_recorded_on_the_pod_before_any_eviction() -> None:
    world = Writer()
    asked = world.evictor.checked

    def look() -> None:
        assert attempt_of(world.pod("new")) is None
        assert world.evictor.evicted == []

    world.evictor.when_checked = look
    made = world.preempt()
    assert (made.begun, made.rejected, asked) == (True, "", ["high", "low"])
    # The victim with the lowest priority is evicted first.
    assert names(made.evicted) == world.evictor.evicted == ["low", "high"]
    attempt = attempt_of(world.pod("new"))
    assert attempt is not None
    assert (attempt.id, attempt.node, attempt.since) == ("id-1", "n", 5)
    assert attempt.victims == ("high", "low")


def test_only_one_of_two_replicas_acts() -> None:
    world = Writer()
    seen = world.pod("new")
    assert world.preempt(seen).begun
    assert world.preempt(seen) == PreemptionResult()
    assert world.evictor.evicted == ["low", "high"]

    # Only one attempt runs even if both replicas have read the pod before either replica writes.
    world = Writer()
    world.evictor.when_checked = lambda: world.store.touch_pod(world.pod("new"), "{}", PREEMPTING)
    assert world.preempt() == PreemptionResult()
    assert world.evictor.evicted == []


def test_no_victim_is_evicted_if_a_budget_forbids_one() -> None:
    world = Writer()
    world.evictor.forbidden["low"] = OutcomeUnknown("429 Cannot evict pod as it would violate")
    made = world.preempt()
    assert not made.begun
    assert "would violate" in made.rejected
    assert world.evictor.evicted == []
    assert attempt_of(world.pod("new")) is None


def test_a_terminating_victim_is_not_evicted_again() -> None:
    world = Writer()
    world.store.delete_pod("default", "low")
    leaving = msgspec.structs.replace(victim("low").metadata, deletion_timestamp="2026-01-01")
    world.store.admit(msgspec.structs.replace(victim("low"), metadata=leaving))
    made = world.preempt()
    assert names(made.evicted) == world.evictor.checked == ["high"]


@pytest.mark.parametrize(
    "deed",
    [
        pytest.param(
            lambda store: store.delete_pod("default", "new"), id="the preemptor was deleted"
        ),
        pytest.param(lambda store: store.delete_pod("default", "high"), id="a victim was deleted"),
    ],
)
def test_no_victim_is_evicted_if_the_state_has_changed(
    deed: Callable[[EmbeddedStore], None],
) -> None:
    world = Writer()
    seen = world.pod("new")
    deed(world.store)
    made = world.preempt(seen)
    assert (made.begun, made.evicted, world.evictor.evicted) == (False, (), [])


def test_a_nominated_or_bound_preemptor_evicts_no_pod() -> None:
    for change in ("nominated", "bound"):
        world = Writer()
        world.store.delete_pod("default", "new")
        status = msgspec.structs.replace(NEW.status, nominated_node_name="m")
        spec = msgspec.structs.replace(NEW.spec, node_name="m")
        as_is = {"nominated": {"status": status}, "bound": {"spec": spec}}[change]
        world.store.admit(msgspec.structs.replace(NEW, **as_is))
        assert world.preempt(NEW) == PreemptionResult()
        assert world.evictor.evicted == []


def test_a_failed_eviction_stops_the_others_and_is_reported() -> None:
    world = Writer()
    world.evictor.errors["low"] = StoreRejected("403 forbidden")
    made = world.preempt()
    assert (made.begun, made.evicted, made.rejected) == (True, (), "403 forbidden")
    # If the state changes at this moment, it is read again.
    world = Writer()
    world.evictor.errors["low"] = StoreConflict("409")
    assert names(world.preempt().evicted) == ["low", "high"]


@pytest.mark.parametrize(
    "deed",
    [
        pytest.param(lambda store: store.delete_pod("default", "new"), id="it is deleted"),
        pytest.param(lambda store: bound_elsewhere(store), id="it is bound"),
        pytest.param(lambda store: another_attempt(store), id="another replica began an attempt"),
    ],
)
def test_no_further_victim_is_evicted_when_the_pod_is_no_longer_pending(
    deed: Callable[[EmbeddedStore], None],
) -> None:
    world = Writer()
    world.evictor.meanwhile = lambda pod: deed(world.store)
    made = world.preempt()
    assert names(made.evicted) == world.evictor.evicted == ["low"]
    assert made.rejected == "default/new no longer waits for its victims"


def bound_elsewhere(store: EmbeddedStore) -> None:
    store.delete_pod("default", "new")
    store.admit(pod(uid="new", name="new", priority=9, node="m"))


def another_attempt(store: EmbeddedStore) -> None:
    waiting = store.read_pod("default", "new")
    assert waiting is not None
    store.touch_pod(waiting, "{}", PREEMPTING)
