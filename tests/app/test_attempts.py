"""Checks that an attempt has one decision ID even if each verb is called on another replica. No
message contains this ID.
"""

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
import pytest
from structlog.testing import capture_logs

from extender.extender import Extender
from extender.ledger.embedded_store import AsyncStore, EmbeddedStore
from headroom.contract.annotations import VRAM
from headroom.contract.decision import decision_of
from headroom.contract.kube import Pod
from headroom.contract.watched import NodeSeen
from headroom.core.cluster.changes import Event
from headroom.core.journal.decision_records import BindTried, Filtered, Ranked
from headroom.runtime.settings.settings import Settings
from tests.builders import DISTRIBUTED, gpunode, kube_node, pod, shared
from tests.serving import binding, offer
from tests.serving import pod as sent


class Replicas:
    """Three replicas that follow the same store."""

    def __init__(self) -> None:
        #: Replicas whose watches deliver no events at the moment.
        self.deaf: set[int] = set()
        self.all = [Extender(Settings(), unready=lambda: "") for _ in range(3)]
        self.store = EmbeddedStore(self.tell_all, time.monotonic)
        self.ledgers = [each.open_ledger(AsyncStore(self.store)) for each in self.all]
        self.verbs = [
            each.verbs(ledger) for each, ledger in zip(self.all, self.ledgers, strict=True)
        ]
        for name in ("a", "b"):
            self.tell_all([NodeSeen(kube_node(name))])
            stamp = datetime.now(UTC).isoformat()
            made = gpunode(shared(f"GPU-{name}"), name=name, observed_at=stamp, plugin=DISTRIBUTED)
            created = self.store.create_gpunode(made)
            self.store.write_spec(created, made.spec)
            assert made.status is not None
            self.store.report([(name, made.status)])
        self.store.admit(pod("8Gi", uid="uid-p", name="p"))

    def tell_all(self, events: Sequence[Event]) -> None:
        for number, each in enumerate(self.all):
            if number not in self.deaf:
                each.deliver(events)

    async def attempt(self, change: bool = False) -> Pod:
        """Call filter, prioritize and bind, each on another replica. Return the resulting pod."""
        version = self.pod().metadata.resource_version
        body = msgspec.json.encode(offer(sent("p", "8Gi", version=version), "a", "b"))
        self.verbs[0].filter(body)
        (best,) = msgspec.json.decode(self.verbs[1].prioritize(body))
        if change:
            self.store.touch_pod(self.pod(), "9Gi", VRAM)
        wanted = msgspec.json.encode(binding(sent("p"), best["Host"]))
        assert msgspec.json.decode(await self.verbs[2].bind(wanted))["Error"] == ""
        await asyncio.sleep(0)  # Decisions are recorded after all responses.
        return self.pod()

    def pod(self) -> Pod:
        found = self.store.read_pod("default", "p")
        assert found is not None
        return found

    def kinds(self, replica: int, decision_id: str) -> set[type]:
        record = self.all[replica].journal.records.of_id(decision_id)
        kinds = (Filtered, Ranked, BindTried)
        return set() if record is None else {kind for kind in kinds if record.times(kind)}


def test_every_verb_is_recorded_under_the_decision_id_on_the_pod() -> None:
    async def play() -> None:
        replicas = Replicas()
        which = decision_of(await replicas.attempt())
        assert which.startswith("uid-p.")
        assert [replicas.kinds(n, which) for n in range(3)] == [{Filtered}, {Ranked}, {BindTried}]

    with capture_logs() as logged:
        asyncio.run(play())
    message = {entry["event"]: entry["decision_id"] for entry in logged if "decision_id" in entry}
    assert set(message) == {"filtered", "bind"}
    assert len(set(message.values())) == 1


@pytest.mark.parametrize(
    "deaf",
    [pytest.param(set(), id="seen by the watch"), pytest.param({2}, id="found by the conflict")],
)
def test_a_pod_that_changed_before_bind_has_another_decision_id(deaf: set[int]) -> None:
    async def play() -> None:
        replicas = Replicas()
        replicas.deaf = deaf
        version = replicas.pod().metadata.resource_version
        which = decision_of(await replicas.attempt(change=True))
        assert which != f"uid-p.{version}"
        assert replicas.kinds(2, which) == {BindTried}
        assert replicas.kinds(0, f"uid-p.{version}") == {Filtered}
        assert [len(each.journal.records) for each in replicas.all] == [1, 1, 1]

    with capture_logs():
        asyncio.run(play())
