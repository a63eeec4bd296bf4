"""Checks that conflicting writes are counted by kind, and that their exceptions are still
raised.
"""

from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from extender.ledger.counting_store import ConflictCountingStore
from extender.ledger.store import Binding, Store
from extender.metrics import Telemetry
from headroom.contract.gpunode import GPUNodeSpec
from headroom.errors import StoreConflict, StoreRejected
from tests.blocking import now
from tests.builders import gpunode, pod

WRITES: dict[str, Callable[[Store], Coroutine[Any, Any, object]]] = {
    "create": lambda store: store.create_gpunode(gpunode()),
    "spec": lambda store: store.write_spec(gpunode(), GPUNodeSpec()),
    "finalizer": lambda store: store.remove_finalizer(gpunode()),
    "binding": lambda store: store.bind(Binding("ns", "p", "u", "1", "n")),
    "pod": lambda store: store.touch_pod(pod(), "x"),
}


class Refusing:
    def __init__(self, err: Exception) -> None:
        self._err = err

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def reject(*_: object) -> None:
            raise self._err

        return reject


def counts(telemetry: Telemetry) -> dict[str, float]:
    value = telemetry.registry.get_sample_value
    name = "headroom_ledger_conflicts_total"
    return {write: value(name, {"write": write}) or 0.0 for write in WRITES}


@pytest.mark.parametrize("write", WRITES)
def test_a_conflict_is_counted(write: str) -> None:
    telemetry = Telemetry(CollectorRegistry())
    store = ConflictCountingStore(cast(Store, Refusing(StoreConflict("newer"))), telemetry)
    with pytest.raises(StoreConflict):
        now(WRITES[write](store))
    assert {name: count for name, count in counts(telemetry).items() if count} == {write: 1}


def test_other_errors_are_not_counted() -> None:
    telemetry = Telemetry(CollectorRegistry())
    store = ConflictCountingStore(cast(Store, Refusing(StoreRejected("no right"))), telemetry)
    for write in WRITES:
        with pytest.raises(StoreRejected):
            now(WRITES[write](store))
    assert not any(counts(telemetry).values())
