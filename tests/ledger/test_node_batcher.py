"""Checks that concurrent binds of one node are reserved with one write and do not affect each
other.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import cast

import pytest

from extender.ledger.bind_call import BindRequest, Bound, Declined, Failed, Outcome
from extender.ledger.embedded_store import EmbeddedStore
from extender.ledger.ledger import Ledger
from extender.ledger.store import Store
from headroom.contract.gpunode import GPUNode, GPUNodeSpec, Reservation
from headroom.contract.kube import ObjectMeta, Pod
from headroom.contract.reasons import Reason
from headroom.core.placement.placement_record import Placement
from headroom.errors import OutcomeUnknown, StoreConflict, StoreRejected, StoreTimeout
from tests.blocking import Faraway
from tests.ledger.stage import WALL_S, adopt, judge, pending_binds, pod
from tests.waiting import PATIENCE_S, until_then

#: Maps a number n and "before" or "after" to what happens before or after the n-th write of
#: reservations.
Deeds = dict[tuple[int, str], Callable[[], Awaitable[None]]]


class Crowd:
    """A node with 10 bytes. While one bind is being written, other binds arrive."""

    def __init__(self) -> None:
        self.deeds: Deeds = {}
        self.calls: Counter[str] = Counter()
        self.written: list[set[str]] = []
        self.store = EmbeddedStore(lambda events: None, lambda: 0.0)
        self.judged: Callable[[Pod, GPUNode], Placement | Reason] = judge
        ids = itertools.count()
        self.ledger = Ledger(
            cast(Store, Faraway(self.store, lambda *call: self.on_the_way(*call))),
            lambda asked, gpunode: self.judged(asked, gpunode),
            adopt,
            lambda gpunode: self.written.append(set(gpunode.spec.reservations)),
            lambda: WALL_S,
            lambda: f"id-{next(ids)}",
        )
        spec = GPUNodeSpec(initialised=True)
        self.held = self.store.create_gpunode(GPUNode(metadata=ObjectMeta(name="n"), spec=spec))
        self.outcomes: dict[str, Outcome | Exception] = {}
        self.attempts: list[asyncio.Task[None]] = []

    async def on_the_way(self, operation: str, when: str) -> None:
        if when == "before":
            self.calls[operation] += 1
        if operation == "write_spec":
            deed = self.deeds.pop((self.calls[operation], when), None)
            if deed is not None:
                await deed()

    def bind(self, *together: int, held: bool = True) -> dict[str, Outcome | Exception]:
        """Bind p0, which requests 1 byte. While this bind is being written, bind p1, p2 and so on,
        which request the bytes in ``together``. Return the result of each bind.
        """
        pods = [
            self.store.admit(pod(f"p{i}", asked=asked)) for i, asked in enumerate((1, *together))
        ]

        self.deeds[1, "before"] = partial(self.come, pods[1:], held)
        asyncio.run(asyncio.wait_for(self.all_done(pods[0], held), PATIENCE_S))
        return self.outcomes

    async def all_done(self, first: Pod, held: bool = True) -> None:
        await self.attempt(first, held)
        await asyncio.gather(*self.attempts, return_exceptions=True)
        assert not pending_binds(self.ledger)

    async def come(self, pods: Sequence[Pod], held: bool = True) -> None:
        for number, each in enumerate(pods, 2):
            await self.comes(each, number, held)

    async def comes(self, asked: Pod, takers: int, held: bool = True) -> None:
        """Start another bind, and wait until it is queued and ``takers`` binds are pending."""
        self.attempts.append(asyncio.create_task(self.attempt(asked, held)))
        await until_then(lambda: pending_binds(self.ledger) >= takers, "it waits")

    async def attempt(self, asked: Pod, held: bool) -> None:
        gpunode = self.held if held else None
        metadata = asked.metadata
        ask = BindRequest(metadata.namespace, metadata.name, metadata.uid, "n", asked, gpunode)
        try:
            self.outcomes[metadata.name] = await self.ledger.binder.bind(ask)
        except Exception as err:  # noqa: BLE001 - looked at by the test
            self.outcomes[metadata.name] = err

    @property
    def reservations(self) -> dict[str, Reservation]:
        gpunode = self.store.read_gpunode("n")
        assert gpunode is not None
        return dict(gpunode.spec.reservations)

    def bound(self) -> list[str]:
        found = [self.store.read_pod("a", f"p{i}") for i in range(len(self.outcomes))]
        return [each.metadata.name for each in found if each is not None and each.node == "n"]


@pytest.fixture
def crowd() -> Crowd:
    return Crowd()


def raises(kind: type[Exception]) -> Callable[[], Awaitable[None]]:
    async def deed() -> None:
        raise kind(f"a {kind.__name__} for the tests")

    return deed


def all_of(count: int) -> list[str]:
    return [f"p{number}" for number in range(count)]


def test_queued_binds_are_reserved_with_one_write(crowd: Crowd) -> None:
    assert set(crowd.bind(2, 2, 2).values()) == {Bound()}
    assert crowd.calls["write_spec"] == 2
    assert crowd.written == [{"uid-p0"}, {f"uid-{name}" for name in all_of(4)}]
    assert crowd.bound() == all_of(4)
    attempts = [reservation.attempt for reservation in crowd.reservations.values()]
    assert len(set(attempts)) == 4


@pytest.mark.parametrize("held", [True, False])
def test_each_bind_is_fitted_after_the_binds_before_it(crowd: Crowd, held: bool) -> None:
    """After 1 and 5 of 10 bytes, 4 bytes are free. The next 5 bytes do not fit, but the 3 bytes
    after that fit.
    """
    outcomes = crowd.bind(5, 5, 3, held=held)
    assert outcomes["p2"] == Declined(Reason.MEMORY_ON_ANY, "100")
    assert crowd.bound() == ["p0", "p1", "p3"]
    assert crowd.reservations.keys() == {"uid-p0", "uid-p1", "uid-p3"}


def test_a_rejected_bind_does_not_affect_the_others(crowd: Crowd) -> None:
    crowd.deeds = {(2, "before"): raises(StoreRejected), (4, "before"): raises(StoreRejected)}
    outcomes = crowd.bind(1, 1, 1)
    failed = [name for name, outcome in outcomes.items() if isinstance(outcome, Failed)]
    assert len(failed) == 1
    assert crowd.bound() == [name for name in all_of(4) if name not in failed]
    assert crowd.reservations.keys() == {f"uid-{name}" for name in crowd.bound()}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", [StoreConflict, OutcomeUnknown, StoreTimeout])
def test_all_binds_are_reserved_after_any_fault_of_the_write(
    crowd: Crowd, kind: type[Exception], when: str
) -> None:
    crowd.deeds = {(2, when): raises(kind)}
    assert set(crowd.bind(2, 2, 2).values()) == {Bound()}
    assert crowd.bound() == all_of(4)
    assert crowd.reservations.keys() == {f"uid-{name}" for name in all_of(4)}


def test_no_bind_is_declined_because_of_a_reservation_that_failed(crowd: Crowd) -> None:
    """p2 does not fit together with p1, but p1's write fails, so p2 fits."""
    looks = itertools.count()

    def once_only(asked: Pod, gpunode: GPUNode) -> Placement | Reason:
        if asked.metadata.name == "p1" and next(looks):
            return Reason.STALE_REPORT
        return judge(asked, gpunode)

    crowd.judged = once_only
    crowd.deeds = {(2, "before"): raises(StoreConflict)}
    outcomes = crowd.bind(5, 5, held=False)
    assert outcomes["p1"] == Declined(Reason.STALE_REPORT, "100")
    assert outcomes["p2"] == Bound()
    assert crowd.reservations.keys() == {"uid-p0", "uid-p2"}


def test_an_internal_error_is_raised_only_for_its_bind(crowd: Crowd) -> None:
    def faulty(asked: Pod, gpunode: GPUNode) -> Placement | Reason:
        if asked.metadata.name == "p2":
            raise ZeroDivisionError
        return judge(asked, gpunode)

    crowd.judged = faulty
    outcomes = crowd.bind(1, 1, 1)
    assert isinstance(outcomes["p2"], ZeroDivisionError)
    assert crowd.bound() == ["p0", "p1", "p3"]
    assert crowd.reservations.keys() == {"uid-p0", "uid-p1", "uid-p3"}


def test_all_binds_fail_if_the_node_cannot_be_read(crowd: Crowd) -> None:
    on_the_way = crowd.on_the_way

    async def silent(operation: str, when: str) -> None:
        if operation == "read_gpunode" and when == "before" and crowd.calls["write_spec"]:
            raise StoreTimeout("nobody answers")
        await on_the_way(operation, when)

    crowd.on_the_way = silent  # type: ignore[method-assign]
    outcomes = crowd.bind(1, 1, held=False)
    assert outcomes["p0"] == Bound()
    assert outcomes["p1"] == outcomes["p2"] == Failed("nobody answers")
    assert crowd.reservations.keys() == {"uid-p0"}


def test_two_attempts_for_one_pod_make_one_reservation(crowd: Crowd) -> None:
    """kube-scheduler retries because the first attempt timed out."""
    shown = crowd.store.admit(pod("p1", asked=4))
    crowd.deeds[1, "after"] = lambda: crowd.comes(shown, 3)
    outcomes = crowd.bind(4)
    assert outcomes["p0"] == outcomes["p1"] == Bound()
    assert crowd.reservations.keys() == {"uid-p0", "uid-p1"}


def test_a_cancelled_bind_does_not_affect_the_others(crowd: Crowd) -> None:
    """A shutdown cancels binds. p1 is cancelled while it also reserves memory for p2."""
    pods = [crowd.store.admit(pod(f"p{i}", asked=2)) for i in range(3)]

    async def one_is_cancelled() -> None:
        crowd.attempts[0].cancel()
        await asyncio.sleep(0)

    crowd.deeds = {(1, "before"): partial(crowd.come, pods[1:]), (2, "before"): one_is_cancelled}
    asyncio.run(asyncio.wait_for(crowd.all_done(pods[0]), PATIENCE_S))
    assert crowd.attempts[0].cancelled()
    assert crowd.outcomes == {"p0": Bound(), "p2": Bound()}
    assert crowd.reservations.keys() == {"uid-p0", "uid-p2"}
