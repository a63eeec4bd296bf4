"""Tests concurrent binds of one node, and decisions that are cached between calls."""

import asyncio
import itertools
from typing import cast

import pytest

from extender.ledger import ledger as ledger_module
from extender.ledger.bind_call import BindRequest, Bound, Declined, Outcome
from extender.ledger.embedded_store import EmbeddedStore
from extender.ledger.store import Store
from headroom.contract.gpunode import GPUNode, GPUNodeSpec
from headroom.contract.kube import ObjectMeta, Pod
from headroom.contract.reasons import Reason
from tests.blocking import Faraway
from tests.ledger.stage import WALL_S, Stage, adopt, judge, pending_binds, pod
from tests.waiting import PATIENCE_S, until_then


def test_many_concurrent_binds_of_one_node_all_succeed() -> None:
    """kube-scheduler does not limit concurrent binds, and packing sends all binds to one node."""
    binders = 16
    store = EmbeddedStore(lambda events: None, lambda: 0.0)
    store.create_gpunode(GPUNode(metadata=ObjectMeta(name="n"), spec=GPUNodeSpec(initialised=True)))
    pods = [store.admit(pod(f"p{i}", asked=1)) for i in range(binders)]
    held = store.read_gpunode("n")

    async def all_bound() -> list[Outcome]:
        ids, far = itertools.count(), cast(Store, Faraway(store))
        ledger = ledger_module.Ledger(
            far, judge, adopt, lambda gpunode: None, lambda: WALL_S, lambda: str(next(ids))
        )
        asks = [BindRequest("a", f"p{i}", f"uid-p{i}", "n", pods[i], held) for i in range(binders)]
        return await asyncio.gather(*map(ledger.binder.bind, asks))

    outcomes = asyncio.run(asyncio.wait_for(all_bound(), PATIENCE_S))
    assert outcomes.count(Bound()) == 10
    assert outcomes.count(Declined(Reason.MEMORY_ON_ANY)) == binders - 10


@pytest.mark.parametrize(
    ("asked", "reads"),
    [
        pytest.param(4, 0, id="state of the previous bind"),
        pytest.param(5, 1, id="state of the store before it declines"),
    ],
)
def test_a_queued_bind_uses_the_latest_state_of_the_node(asked: int, reads: int) -> None:
    calls: list[str] = []

    async def both_bound() -> list[Outcome]:
        others: list[asyncio.Task[Outcome]] = []

        async def second_comes(operation: str, when: str) -> None:
            if when == "before":
                calls.append(operation)
            if (operation, when) == ("write_spec", "before") and not others:
                others.append(asyncio.create_task(bind("q", q)))
                await until_then(lambda: pending_binds(ledger) == 2, "the second waits")

        store = EmbeddedStore(lambda events: None, lambda: 0.0)
        far = cast(Store, Faraway(store, second_comes))
        ledger = ledger_module.Ledger(
            far, judge, adopt, lambda gpunode: None, lambda: WALL_S, lambda: "id"
        )
        held = store.create_gpunode(
            GPUNode(metadata=ObjectMeta(name="n"), spec=GPUNodeSpec(initialised=True))
        )
        p, q = store.admit(pod()), store.admit(pod("q", asked=asked))

        async def bind(name: str, shown: Pod) -> Outcome:
            return await ledger.binder.bind(BindRequest("a", name, f"uid-{name}", "n", shown, held))

        return [await bind("p", p), await others[0]]

    outcomes = asyncio.run(asyncio.wait_for(both_bound(), PATIENCE_S))
    assert outcomes == [Bound(), Bound() if asked == 4 else Declined(Reason.MEMORY_ON_ANY)]
    assert calls.count("read_gpunode") == reads


def test_no_state_is_kept_for_a_node_without_binds(stage: Stage) -> None:
    kept: list[set[str]] = []
    stage.fault = lambda operation, when: kept.append(
        set(stage.ledger.awaited.binder._batcher._queues)
    )
    assert stage.bind() == Bound()
    assert {"n"} in kept
    stage.store.admit(pod("q"))
    assert stage.bind(stage.ask(pod("q"), node="gone", held=False)) == Declined(Reason.NO_REPORT)
    assert not stage.ledger.awaited.binder._batcher._queues
