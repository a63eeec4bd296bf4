"""Applies changes to the state: our own at once, watch events in short turns of the event loop.

In turns, a list of thousands of objects delays a call of kube-scheduler by one turn at most. Watch
events that arrive within ``TOGETHER_S`` share one snapshot, as it costs nearly the same for one
changed node as for many.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from extender.periodic import STUCK_AFTER_S, Loops
from extender.state.changes import Event
from extender.state.cluster_state import ClusterState

#: Longest turn: a call waits for at most one.
TURN_S = 0.001
#: What comes within this time after a snapshot is for the next one, and is not waited for longer
#: where there is more to do.
TOGETHER_S = 0.05
_LOOK_AGAIN_S = 0.001
#: After an exception.
RETRY_S = 1.0
#: Deliveries of the watches that wait to be applied: each is what a watch had read at once.
MAX_TOLD = 1_000


class EventQueue:
    """The one place that changes ``cluster``, on the loop of the thread that made it.

    ``took`` is called with events that were applied, or will be visible when the nodes that they
    changed were weighed; ``turned`` after every turn that weighed.
    """

    def __init__(
        self,
        cluster: ClusterState,
        took: Callable[[Sequence[Event]], None],
        turned: Callable[[], None],
        loops: Loops,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._owner = threading.get_ident()
        self._cluster = cluster
        self._took, self._turned = took, turned
        self._loops = loops
        self._moved_s = time.monotonic()
        self._ours: deque[Sequence[Event]] = deque()
        self._told: deque[Sequence[Event]] = deque()
        #: Those that are being taken, and what of it is left.
        self._taking: tuple[Sequence[Event], Iterator[None]] | None = None
        #: Events to be taken once more, each by itself: of those that were taken together with
        #: it, one raised an exception.
        self._again: deque[Event] = deque()
        self._snapshot_due = False
        #: Set while no turn is to come.
        self._idle = asyncio.Event()
        self._idle.set()
        self._requeued = False
        #: The next turn, where it waits for more to come.
        self._later: asyncio.TimerHandle | None = None
        self._snapshot_at_s = -TOGETHER_S

    def deliver(self, events: Sequence[Event]) -> None:
        """Our own doings, from any thread: applied at once on the loop's, in the order of calls."""
        self._ours.append(events)
        if threading.get_ident() == self._owner:
            self._take_ours()
        else:
            self._loop.call_soon_threadsafe(self._take_ours)

    def tell(self, events: Sequence[Event]) -> None:
        """Queue watch events, from any thread: applied in turns, in the order of calls. A thread
        waits here while the queue is full."""
        if threading.get_ident() != self._owner:
            self._wait_for_room()
        self._told.append(events)
        if not self._requeued:
            self._requeued = True
            self._loop.call_soon_threadsafe(self._begin)

    def _wait_for_room(self) -> None:
        """Events that are not read yet wait at the API server. Not for ever, since a loop that has
        ended takes nothing any more: ``/healthz`` reports one that is stuck."""
        until_s = time.monotonic() + STUCK_AFTER_S
        while len(self._told) >= MAX_TOLD and time.monotonic() < until_s:
            time.sleep(_LOOK_AGAIN_S)

    async def idle(self) -> None:
        """Until all that was told has been applied."""
        if self.is_behind:
            self._begin()
        await self._idle.wait()

    @property
    def is_behind(self) -> bool:
        """Whether something that was told is not applied yet."""
        return (
            bool(self._told)
            or bool(self._again)
            or self._taking is not None
            or self._cluster.has_unweighed
        )

    def stuck(self) -> dict[str, float]:
        """As ``Loops.stuck``; from any thread."""
        since_s = time.monotonic() - self._moved_s
        return {"intake": since_s} if self.is_behind and since_s > STUCK_AFTER_S else {}

    def _take_ours(self) -> None:
        """All that has come so far: what another thread handed in first goes first."""
        while self._ours:
            events = self._ours.popleft()
            try:
                self._cluster.apply(events)
            except Exception:  # noqa: BLE001 - whatever it is: what comes later is taken all the same
                self._failing()
                self._again.extend(events)
            self._guarded(partial(self._took, events))
        self._guarded(self._turned)
        self._snapshot_due = True
        self._begin()

    def _begin(self) -> None:
        if not self._idle.is_set() and self._later is None:
            return
        self._idle.clear()
        wait_s = TOGETHER_S - (time.monotonic() - self._snapshot_at_s)
        if self._snapshot_due or wait_s <= 0:
            if self._later is not None:
                self._later.cancel()
            self._loop.call_soon(self._turn)
            self._later = None
        elif self._later is None:
            self._later = self._loop.call_later(wait_s, self._turn)

    def _turn(self) -> None:
        self._later = None
        self._moved_s = time.monotonic()
        try:
            self._take_turn()
        except Exception:  # noqa: BLE001 - as above
            self._failing()
            self._loop.call_later(RETRY_S, self._turn)

    def _take_turn(self) -> None:
        if self._work():
            self._loop.call_soon(self._turn)
        else:
            self._idle.set()
            self._requeued = False
            if self._told:  # by a thread, since `_work` looked
                self._begin()

    def _work(self) -> bool:
        """Do one turn; return whether anything is left to do."""
        if self._snapshot_due:
            self._cluster.snapshot()
            self._snapshot_due = False
            self._snapshot_at_s = time.monotonic()
        elif self.is_behind:
            until_s = time.monotonic() + TURN_S
            while self._step() and time.monotonic() < until_s:
                pass
            self._guarded(self._turned)
            late = time.monotonic() - self._snapshot_at_s >= TOGETHER_S
            self._snapshot_due = late or not self.is_behind
        return self._snapshot_due or self.is_behind

    def _step(self) -> bool:
        """Take all that was told before weighing any node: of what was told twice once is enough;
        false where there is nothing to do."""
        if self._again:
            event = self._again.popleft()
            self._guarded(lambda: self._cluster.apply([event]))
            return True
        if self._taking is None and self._told:
            events = self._told.popleft()
            self._taking = events, self._cluster.taking(events)
        if self._taking is None:
            try:
                return self._cluster.weigh_next()
            except Exception:  # noqa: BLE001 - as above
                self._failing()
                return True
        events, steps = self._taking
        try:
            for _ in steps:
                return True
        except Exception:  # noqa: BLE001 - as above
            self._failing()
            self._again.extend(events)
        self._taking = None
        self._guarded(lambda: self._took(events))
        return True

    def _weigh_failed_again(self) -> None:
        self._cluster.weigh_failed_again()
        self._begin()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # noqa: BLE001 - as above
            self._failing()

    def _failing(self) -> None:
        """Counts and logs the exception that is being handled; what it was about is weighed
        again."""
        self._loops.failing("intake")
        self._loop.call_later(RETRY_S, self._weigh_failed_again)
