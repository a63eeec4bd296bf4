"""Explores every order of writes, deletions, watch events and late responses for one GPUNode.

The extender's ledger, store and cache run on an in-memory server. Each response waits until the
explorer delivers it. In the meantime, other clients delete and recreate the GPUNode, and the watch
delivers these changes at any later time.
"""

import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import coroutine
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from extender.ledger.embedded_store import EmbeddedStore
from extender.ledger.followed_store import FollowedStore
from extender.ledger.ledger import Ledger
from extender.ledger.store import Store
from extender.metrics import Telemetry
from extender.reconcile.queue import uninitialised
from headroom.contract.gpunode import GPUNode, GPUNodeSpec
from headroom.contract.kube import ObjectMeta
from headroom.contract.watched import GPUNodeGone, GPUNodeSeen, NodeSeen
from headroom.core.cluster.changes import Event, GPUNodeWritten
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.policy import Rules
from headroom.errors import StoreError
from tests.builders import kube_node, pod, reservation, shared, status

MOST_STATES = 20_000
REPORT = status(shared())
TELEMETRY = Telemetry(CollectorRegistry())
ENDED = pod("4Gi", node="n", phase="Succeeded")


@coroutine
def _until_delivered() -> Generator[None]:
    yield


class LateStore:
    """A store that performs each call immediately, but whose response arrives only when the
    explorer continues the caller.
    """

    def __init__(self, store: EmbeddedStore) -> None:
        self._store = store
        self.running = ""
        #: For each task, its calls with their results (UID and version, or an error), and the
        #: arrivals of responses.
        self.history: dict[str, list[object]] = {}

    def __getattr__(self, operation: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any) -> Any:
            answer: Any
            try:
                answer = getattr(self._store, operation)(*args)
            except StoreError as err:
                answer = err
            task = self.history.setdefault(self.running, [])
            task.append((operation, _known(answer)))
            await _until_delivered()
            task.append("arrived")
            if isinstance(answer, StoreError):
                raise answer
            return answer

        return call


def _known(answer: object) -> object:
    metadata = getattr(answer, "metadata", None)
    return (metadata.uid, metadata.resource_version) if metadata else type(answer).__name__


class Replica:
    """An extender's cache, ledger and watch, and two tasks that write the GPUNode."""

    def __init__(self, written: Callable[[GPUNode], Event]) -> None:
        self.watch: deque[Event] = deque()
        self.server = EmbeddedStore(self.watch.extend, lambda: 0.0)
        self.writer = ClusterWriter(Rules(), stale_after_s=90.0, epoch_s=0.0)
        self.cluster = self.writer.cluster
        self.writer.apply([NodeSeen(kube_node())])
        self.server.admit(ENDED)
        self.create()
        self.apply(*self.watch)
        self.watch.clear()
        numbers = itertools.count()
        self.late = LateStore(self.server)
        ledger = Ledger(
            FollowedStore(
                cast(Store, self.late),
                TELEMETRY,
                self.cluster,
                lambda events: self.apply(*events),
            ),
            lambda pod, gpunode: self.cluster.judge(pod, gpunode, 0.0),
            self.cluster.adopt,
            written=lambda gpunode: self.apply(written(gpunode)),
            wall_s=lambda: 0.0,
            new_id=lambda: str(next(numbers)),
        )
        removal = ledger.reservations.remove("n", ENDED.metadata.uid)
        self.tasks: dict[str, Coroutine[Any, Any, object]] = {
            "the removal goes on": removal,
            "the initialisation goes on": self._initialise(ledger),
        }
        self.deeds = ["the GPUNode is deleted", "it is created again"]

    async def _initialise(self, ledger: Ledger) -> None:
        await ledger.initialiser.initialise(uninitialised(self.cluster))

    def create(self) -> None:
        spec = GPUNodeSpec(
            initialised=True,
            reservations={ENDED.metadata.uid: reservation({"GPU-0": 4 << 30}, name="p")},
        )
        self.server.create_gpunode(GPUNode(metadata=ObjectMeta(name="n"), spec=spec))
        self.server.report([("n", REPORT)])

    def apply(self, *events: Event) -> None:
        self.writer.apply(events)

    def steps(self) -> list[str]:
        deeds = self.deeds[:1]
        if deeds and (self.server.read_gpunode("n") is None) != (deeds[0] == "it is created again"):
            deeds = []
        return [*self.tasks, *deeds, *(["the watch reports"] if self.watch else [])]

    def step(self, name: str) -> None:
        if name == "the watch reports":
            self.apply(self.watch.popleft())
        elif name in self.tasks:
            self.late.running = name
            try:
                self.tasks[name].send(None)
            except StopIteration:
                del self.tasks[name]
        else:
            self.deeds.remove(name)
            if name == "it is created again":
                self.create()
            else:
                self.server.delete_gpunode("n")

    def wrong(self) -> str:
        """Return how the cache differs from the server although the watch has delivered all
        events.
        """
        held, cached = self.server.read_gpunode("n"), self.cluster.gpunode("n")
        if self.watch or held == cached:
            return ""
        return f"the API server has {_known(held)}, the cache {_known(cached)}"

    def key(self) -> bytes:
        uids: dict[str, int] = {}
        state = (
            [_known(self.server.read_gpunode("n")), _known(self.cluster.gpunode("n"))],
            [_known(getattr(event, "gpunode", event)) for event in self.watch],
            self.late.history,
            self.deeds,
            [*self.tasks],
        )
        text = msgspec.json.encode(state).decode()
        for part in text.split('"'):
            if part.startswith("gpunode-"):
                text = text.replace(part, str(uids.setdefault(part, len(uids))))
        return text.encode()

    def close(self) -> None:
        for task in self.tasks.values():
            task.close()


def explore(written: Callable[[GPUNode], Event]) -> tuple[int, tuple[str, ...], str]:
    """Return the number of states, and the steps and the text of the first error."""
    ahead, seen = [tuple[str, ...]()], set[bytes]()
    while ahead:
        story, replica = ahead.pop(), Replica(written)
        for name in story:
            replica.step(name)
        while (key := replica.key()) not in seen and not replica.wrong():
            seen.add(key)
            assert len(seen) <= MOST_STATES
            first, *others = [*replica.steps(), ""]
            ahead.extend((*story, name) for name in others if name)
            if first:
                replica.step(first)
                story = (*story, first)
        wrong = replica.wrong()
        replica.close()
        if wrong:
            return len(seen), story, wrong
    return len(seen), (), ""


@pytest.mark.slow
def test_no_late_answer_makes_the_cache_differ_from_the_server() -> None:
    states, story, wrong = explore(lambda gpunode: GPUNodeWritten(gpunode, 0.0))
    assert (story, wrong) == ((), "")
    assert states > 900


def test_a_response_used_like_a_watch_event_would_revive_a_deleted_gpunode() -> None:
    _, story, wrong = explore(lambda gpunode: GPUNodeSeen(gpunode, 0.0))
    assert "the GPUNode is deleted" in story
    assert "the API server has NoneType" in wrong


@pytest.mark.parametrize("operation", ["read_gpunode", "write_spec", "remove_finalizer"])
def test_a_gpunode_that_a_call_does_not_find_leaves_the_cache(operation: str) -> None:
    replica = Replica(lambda gpunode: GPUNodeWritten(gpunode, 0.0))
    replica.close()
    store = FollowedStore(
        cast(Store, replica.late),
        TELEMETRY,
        replica.cluster,
        lambda events: replica.apply(*events),
    )
    before = replica.cluster.gpunode("n")
    assert before is not None
    args = {"read_gpunode": ("n",), "write_spec": (before, before.spec)}.get(operation, (before,))
    replica.server.delete_gpunode("n")
    call = getattr(store, operation)(*args)
    call.send(None)
    assert replica.cluster.gpunode("n") is before
    with pytest.raises((StopIteration, StoreError)):
        call.send(None)
    assert replica.cluster.gpunode("n") is None


def test_a_gpunode_created_meanwhile_stays_in_the_cache() -> None:
    replica = Replica(lambda gpunode: GPUNodeWritten(gpunode, 0.0))
    replica.close()
    replica.server.delete_gpunode("n")
    gone = replica.cluster.gpunode("n")
    assert gone is not None
    replica.create()
    replica.apply(*replica.watch)
    successor = replica.cluster.gpunode("n")
    replica.apply(GPUNodeGone("n", gone.metadata.uid), GPUNodeWritten(gone, 0.0))
    assert replica.cluster.gpunode("n") is successor
    assert successor is not None
    assert successor.metadata.uid != gone.metadata.uid
