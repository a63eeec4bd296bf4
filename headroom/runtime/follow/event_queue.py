"""Applies changes to the state: own changes immediately, and watch events in short turns on the
event loop.

Turns keep latency low: even while thousands of listed objects are applied, a call of kube-scheduler
waits for at most one turn. Watch events that arrive within ``TOGETHER_S`` share one snapshot,
because a snapshot with many changed nodes costs hardly more than a snapshot with one changed node.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from headroom.core.cluster.changes import Effects, Event
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.runtime.loops import STUCK_AFTER_S, Loops

#: Maximum length of a turn, in seconds. A call waits for at most one turn.
TURN_S = 0.001
#: Minimum time between two snapshots made for watch events, in seconds.
TOGETHER_S = 0.05
#: Seconds after which a waiting thread checks again whether the queue is still full.
_POLL_S = 0.001
#: Delay before a retry after an exception, in seconds.
RETRY_S = 1.0
#: Maximum number of queued batches of watch events. A batch contains the events that a watch has
#: read in one step.
MAX_QUEUED = 1_000


class EventQueue:
    """Serialises all changes of the state on the event loop of the thread that created it.

    After each own change and after each turn, it passes the effects to all ``reactions``.
    """

    def __init__(self, writer: ClusterWriter, loops: Loops) -> None:
        self._loop = asyncio.get_running_loop()
        self._owner = threading.get_ident()
        self._writer = writer
        self._loops = loops
        self.retry_s, self.together_s = RETRY_S, TOGETHER_S
        #: Whether each turn ends with a snapshot for decisions. Views make their own snapshots.
        self.settles = True
        self.reactions: list[Callable[[Effects], None]] = []
        self._progress_at_s = time.monotonic()
        self._own: deque[Sequence[Event]] = deque()
        self._watched: deque[Sequence[Event]] = deque()
        #: The batch that is being applied, and its remaining steps.
        self._applying: tuple[Sequence[Event], Iterator[None]] | None = None
        #: Events to apply again one by one, because an event of their batch raised an exception.
        self._again: deque[Event] = deque()
        self._snapshot_due = False
        #: This event is set while no turn is scheduled.
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_scheduled = False
        #: The next turn, if it was delayed to collect more events.
        self._later: asyncio.TimerHandle | None = None
        self._snapshot_at_s = -self.together_s

    def deliver(self, events: Sequence[Event]) -> None:
        """Apply changes of this process immediately, in the order of the calls. May be called from
        any thread."""
        self._writer.set_epoch(_epoch_s())
        self._own.append(events)
        if threading.get_ident() == self._owner:
            self._apply_own()
        else:
            self._loop.call_soon_threadsafe(self._apply_own)

    def enqueue(self, events: Sequence[Event]) -> None:
        """Queue watch events. They are applied in turns, in the order of the calls.

        May be called from any thread. Every thread except the event loop's waits while the queue is
        full.
        """
        self._writer.set_epoch(_epoch_s())
        if threading.get_ident() != self._owner:
            self._wait_while_full()
        self._watched.append(events)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon_threadsafe(self._begin)

    def _wait_while_full(self) -> None:
        """Wait while the queue is full. Meanwhile, new events wait at the API server.

        The wait has a time limit, because an event loop that has ended applies nothing.
        ``/healthz`` reports a queue that is stuck."""
        until_s = time.monotonic() + STUCK_AFTER_S
        while len(self._watched) >= MAX_QUEUED and time.monotonic() < until_s:
            time.sleep(_POLL_S)

    async def idle(self) -> None:
        """Wait until all queued events are applied and all nodes are weighed."""
        if self.is_behind:
            self._begin()
        await self._idle.wait()

    @property
    def is_behind(self) -> bool:
        """Whether an event is not applied yet, or a node is not weighed yet."""
        return (
            bool(self._watched)
            or bool(self._again)
            or self._applying is not None
            or self._writer.parts.queue.is_due
        )

    def stuck(self) -> dict[str, float]:
        """Return the seconds without progress if the queue is stuck, in the same format as
        ``Loops.stuck``. May be called from any thread."""
        since_s = time.monotonic() - self._progress_at_s
        return {"event_queue": since_s} if self.is_behind and since_s > STUCK_AFTER_S else {}

    def _apply_own(self) -> None:
        """Apply all own changes delivered so far, in the order of delivery."""
        while self._own:
            events = self._own.popleft()
            try:
                effects = self._writer.apply(events)
            except Exception:  # noqa: BLE001 - later events must still be applied
                self._failing()
                self._again.extend(events)
                effects = self._writer.take_effects()
            self._react(effects)
        self._snapshot_due = True
        self._begin()

    def _begin(self) -> None:
        if not self._idle.is_set() and self._later is None:
            return
        self._idle.clear()
        wait_s = self.together_s - (time.monotonic() - self._snapshot_at_s)
        if self._snapshot_due or wait_s <= 0:
            if self._later is not None:
                self._later.cancel()
            self._loop.call_soon(self._turn)
            self._later = None
        elif self._later is None:
            self._later = self._loop.call_later(wait_s, self._turn)

    def _turn(self) -> None:
        self._later = None
        self._progress_at_s = time.monotonic()
        try:
            self._take_turn()
        except Exception:  # noqa: BLE001 - as above
            self._failing()
            self._loop.call_later(self.retry_s, self._turn)

    def _take_turn(self) -> None:
        if self._work():
            self._loop.call_soon(self._turn)
        else:
            self._idle.set()
            self._is_scheduled = False
            if self._watched:  # queued by another thread after `_work` returned
                self._begin()

    def _work(self) -> bool:
        """Run one turn. Return whether any work is left."""
        if self._snapshot_due:
            if self.settles:
                self._writer.settle()
            self._snapshot_due = False
            self._snapshot_at_s = time.monotonic()
        elif self.is_behind:
            until_s = time.monotonic() + TURN_S
            while self._step() and time.monotonic() < until_s:
                pass
            self._react(self._writer.take_effects())
            late = time.monotonic() - self._snapshot_at_s >= self.together_s
            self._snapshot_due = late or not self.is_behind
        return self._snapshot_due or self.is_behind

    def _step(self) -> bool:
        """Apply one step of a queued event, or weigh one node. Return False if there is no work.

        Nodes are weighed after all queued events, so that a node that changed twice is weighed
        once.
        """
        if self._again:
            event = self._again.popleft()
            self._guarded(lambda: self._react(self._writer.apply([event])))
            return True
        if self._applying is None and self._watched:
            events = self._watched.popleft()
            self._applying = events, self._writer.steps(events)
        if self._applying is None:
            try:
                return self._writer.weigh_next()
            except Exception:  # noqa: BLE001 - as above
                self._failing()
                return True
        events, steps = self._applying
        try:
            for _ in steps:
                return True
        except Exception:  # noqa: BLE001 - as above
            self._failing()
            self._again.extend(events)
        self._applying = None
        return True

    def _weigh_failed_again(self) -> None:
        self._writer.weigh_failed_again()
        self._begin()

    def _react(self, effects: Effects) -> None:
        for reaction in self.reactions:
            self._guarded(partial(reaction, effects))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # noqa: BLE001 - as above
            self._failing()

    def _failing(self) -> None:
        """Count and log the current exception. Schedule another attempt for nodes that could not be
        weighed."""
        self._loops.failing("event_queue")
        self._loop.call_later(self.retry_s, self._weigh_failed_again)


def _epoch_s() -> float:
    """Return the Unix time at which the monotonic clock was 0. It changes if the wall clock is
    set."""
    return time.time() - time.monotonic()
