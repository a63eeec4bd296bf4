"""An in-memory cluster with a state, a store, a ledger and one clock. Nothing happens unless a test
calls it.

Tests of the controllers, of the state and of kube-scheduler's calls use it. The store delivers pods
and GPUNodes to the state. Other objects are applied to the state directly.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry

from extender.event_recorder import EventRecorder
from extender.ledger.bind_call import BindRequest, Outcome
from extender.ledger.embedded_store import AsyncStore, Fault, no_fault
from extender.metrics import Telemetry
from extender.scheduler.server import Verbs
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Pod
from headroom.contract.watched import GPUNodeSeen, PodSeen
from headroom.core.cluster.changes import Event
from headroom.core.cluster.notices import Notice
from headroom.core.journal.journal import Journal
from headroom.core.placement.policy import Rules
from headroom.errors import StoreError
from tests.blocking import ledger_over
from tests.builders import NOW_S
from tests.recording import RecordingState
from tests.scheduler.verbs_on import verbs_on
from tests.state.states import EPOCH_S, STALE_AFTER_S
from tests.store import PlayedStore


class Evictor:
    """Records evictions, but does not change the store.

    ``forbidden`` and ``errors`` map UIDs of pods to errors. Every check and eviction of the pod
    raises the error in ``forbidden``. Only the next eviction raises the error in ``errors``.
    ``meanwhile`` is called after each eviction.
    """

    def __init__(self) -> None:
        self.checked: list[str] = []
        self.evicted: list[str] = []
        #: The maximum grace period that was requested with each eviction.
        self.grace_s: list[int | None] = []
        self.errors: dict[str, StoreError] = {}
        self.forbidden: dict[str, StoreError] = {}
        self.when_checked: Callable[[], object] = lambda: None
        self.meanwhile: Callable[[Pod], object] = lambda pod: None

    async def may_evict(self, pod: Pod) -> None:
        self.checked.append(pod.metadata.uid)
        if error := self.forbidden.get(pod.metadata.uid):
            raise error
        self.when_checked()

    async def evict(self, pod: Pod, most_grace_s: int | None = None) -> None:
        uid = pod.metadata.uid
        if error := self.errors.pop(uid, None) or self.forbidden.get(uid):
            raise error
        self.evicted.append(uid)
        self.grace_s.append(most_grace_s)
        self.meanwhile(pod)


class World:
    """A cluster. The wall clock showed ``epoch_s`` when the monotonic clock was 0."""

    def __init__(
        self,
        rules: Rules | None = None,
        *,
        stale_after_s: float = STALE_AFTER_S,
        epoch_s: float = EPOCH_S,
    ) -> None:
        self.now_s, self.epoch_s = NOW_S, epoch_s
        self.state = RecordingState(rules or Rules(), stale_after_s, epoch_s)
        #: A function that is called before and after each operation of the store, such as
        #: ``tests.ledger.stage.once``.
        self.fault: Fault = no_fault
        self.store = PlayedStore(
            self.deliver, self.monotonic_s, lambda operation, when: self.fault(operation, when)
        )
        self._watch_is_late = False
        self.ledger = ledger_over(
            self.state,
            self.store,
            self.monotonic_s,
            wall_s=self.wall_s,
            written=lambda gpunode: self.state.apply([GPUNodeSeen(gpunode, self.now_s)]),
        )
        self.journal = Journal()
        self.evictor = Evictor()
        self.posted: list[Notice] = []
        #: ``takes_events`` is whether Events can be written. ``attempts`` counts the attempts to
        #: write an Event.
        self.takes_events, self.attempts = True, 0

    def deliver(self, events: Sequence[Event]) -> None:
        """Apply changes of the store to the state, unless the watch is late."""
        if not self._watch_is_late:
            self.state.apply(events)

    @contextlib.contextmanager
    def late_watch(self) -> Iterator[None]:
        """Deliver no changes of the store to the state during the context."""
        self._watch_is_late = True
        yield
        self._watch_is_late = False

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.epoch_s + self.now_s

    def stamp(self, ago_s: float = 0.0) -> str:
        """Return the timestamp of ``ago_s`` seconds ago on the wall clock."""
        return datetime.fromtimestamp(self.wall_s() - ago_s, UTC).isoformat()

    @functools.cached_property
    def telemetry(self) -> Telemetry:
        return Telemetry(CollectorRegistry())  # takes longer than everything else

    @functools.cached_property
    def event_recorder(self) -> EventRecorder:
        return EventRecorder(self._post, self.telemetry)

    def _post(self, notice: Notice) -> bool:
        self.attempts += 1
        if self.takes_events:
            self.posted.append(notice)
        return self.takes_events

    @property
    def events(self) -> list[tuple[str, str]]:
        """Return the uid and the reason of each Event."""
        return [(notice.about.uid, notice.reason) for notice in self.posted]

    @property
    def async_store(self) -> AsyncStore:
        return AsyncStore(self.store)

    def verbs(self, **how: Any) -> Verbs:
        """Return the handlers for kube-scheduler's calls. ``how`` is passed to ``verbs_on``."""
        given = {"ledger": self.ledger.awaited.binder, "journal": self.journal, **how}
        return verbs_on(self.state, self.monotonic_s, epoch_s=self.epoch_s, **given)

    def see(self, *pods: Pod) -> None:
        self.state.apply(map(PodSeen, pods))

    def gpunode(self, name: str = "n") -> GPUNode:
        found = self.store.read_gpunode(name)
        assert found is not None
        return found

    def pod(self, name: str) -> Pod:
        found = self.store.read_pod("default", name)
        assert found is not None
        return found

    def bind(self, pod: Pod, node: str = "n") -> Outcome:
        """Create the pod, and bind it to the node."""
        self.store.admit(pod)
        metadata = pod.metadata
        held = self.store.read_pod(metadata.namespace, metadata.name)
        ask = BindRequest(
            metadata.namespace, metadata.name, metadata.uid, node, held, self.gpunode(node)
        )
        bound: Outcome = self.ledger.bind(ask)
        return bound

    def sample(self, name: str, **labels: str) -> float:
        """Return the value of a metric, or 0 if the metric does not exist."""
        return self.telemetry.registry.get_sample_value(name, labels) or 0.0
