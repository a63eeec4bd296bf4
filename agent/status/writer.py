"""Decides when the API server hears from us, and keeps trying until it has.

Nothing is queued. What is due is always computed from the last status that was *accepted* and the
newest one, so a failed write cannot lose the newest report nor send an old one after it.

The heartbeat vouches for the report: it names the status that was accepted last and when the newest
sample was taken, and is sent only while that sample says the same, SM activity aside, which never
goes alone more than once a minute. If status writes are refused while the Lease goes through, the
node must go stale, not look alive with figures that are no longer true.

However often samples come, and whatever they say, a status is written at most once a second.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import structlog

from agent.status.builder import FREED_EVERY_S, GROWN_EVERY_S, worth_writing
from contract.gpunode import GPUNodeStatus
from contract.heartbeat import Vouch

_log = structlog.get_logger()

FIRST_BACK_OFF_S = 1.0
LONGEST_BACK_OFF_S = 30.0


class NotDelivered(Exception):
    """The API server did not take it; ``retry_after_s`` is the wait that it asked for, if any."""

    def __init__(self, why: str, retry_after_s: float = 0.0) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class NotThereYet(NotDelivered):
    """No extender has created this node's GPUNode; agents wait, they may not create it."""


@dataclass(frozen=True, slots=True)
class Held:
    """A GPUNode at the API server: which object, and which version of it; empty: there is none."""

    uid: str = ""
    version: str = ""


class Publisher(Protocol):
    """Where reports go. Every method raises ``NotDelivered``, and nothing else."""

    def report(self, status: GPUNodeStatus) -> Held:
        """Write ``status``; returns the GPUNode that took it."""
        ...

    def held(self) -> Held:
        """The GPUNode as it is now."""
        ...

    def reported(self) -> tuple[Held, str]:
        """The same, and its status's ``observedAt``; costs the whole object."""
        ...

    def heartbeat(self, now: datetime, vouch: Vouch) -> str:
        """Renew the Lease; returns its resourceVersion."""
        ...


class StatusWriter:
    """Hands each new status to the publisher when it is due; ``deliver`` never raises."""

    def __init__(
        self,
        publisher: Publisher,
        heartbeat_s: float,
        monotonic: Callable[[], float],
        now: Callable[[], datetime],
        chance: random.Random,
    ) -> None:
        self._publisher = publisher
        self._heartbeat_s = heartbeat_s
        self._monotonic = monotonic
        self._now = now
        self._chance = chance
        #: The last status that was accepted, the GPUNode that was last seen to hold it, and when it
        #: was written; None: it is not known what the API server holds.
        self._written: GPUNodeStatus | None = None
        self._held = Held()
        self._written_at_s = 0.0
        self._beat_at_s: float | None = None
        #: The Lease's resourceVersion, and when we were told of it.
        self._lease = ""
        self._told_at_s = 0.0
        self._failures = 0
        self._not_before_s = 0.0
        #: (report or heartbeat, accepted or failed) -> how often.
        self.writes = Counter[tuple[str, str]]()

    def deliver(self, status: GPUNodeStatus, sampled_at_s: float) -> float:
        """Write what is due of a status whose sample began at ``sampled_at_s`` (monotonic clock).

        Returns in how many seconds a new sample is wanted, since something is held back or has
        failed; infinity where nothing is.
        """
        at_s = self._monotonic()
        if self._failures and at_s < self._not_before_s:
            return self._not_before_s - at_s
        try:
            self._deliver(status, sampled_at_s, at_s)
        except NotDelivered as err:
            self._failures += 1
            wait_s = max(self._back_off_s(), err.retry_after_s)
            self._not_before_s = self._monotonic() + wait_s
            event = "gpunode_awaited" if isinstance(err, NotThereYet) else "report_not_delivered"
            _log.warning(event, reason=str(err), failures=self._failures, retry_s=round(wait_s, 1))
            return wait_s
        self._failures = 0
        return self._held_back_s(status, at_s - self._written_at_s)

    def _deliver(self, status: GPUNodeStatus, sampled_at_s: float, at_s: float) -> None:
        beat = self._beat_at_s is None or at_s - self._beat_at_s >= self._heartbeat_s
        if beat and self._written is not None and not self._still_holds(self._written):
            self._written = None
        since_s = at_s - self._written_at_s
        if self._written is None or (
            since_s >= FREED_EVERY_S and worth_writing(self._written, status, since_s)
        ):
            self._report(status, at_s)
        if beat and self._held_back_s(status, 0.0) == math.inf:
            self._beat(status, sampled_at_s, at_s)

    def _still_holds(self, written: GPUNodeStatus) -> bool:
        """Whether the API server has what we believe it has. It has not where the GPUNode was made
        anew, where somebody else wrote, or where an older write of ours was late on its way."""
        held = self._publisher.held()
        if held == self._held:
            return True
        if held.uid != self._held.uid:
            return False
        held, observed_at = self._publisher.reported()  # most likely only promises were written
        if held.uid != self._held.uid or observed_at != written.observed_at:
            return False
        self._held = held
        return True

    def _report(self, status: GPUNodeStatus, at_s: float) -> None:
        # Until it is answered: one that is not may have been taken, and no heartbeat may vouch for
        # the one before it.
        self._written = None
        with self._counted("report"):
            self._held = self._publisher.report(status)
        self._written, self._written_at_s = status, at_s
        _log.info("report_written", devices=len(status.devices), observed_at=status.observed_at)

    def _beat(self, status: GPUNodeStatus, sampled_at_s: float, at_s: float) -> None:
        assert self._written is not None
        vouch = Vouch(
            sampled_at=status.observed_at,
            gpunode=self._held.uid,
            observed_at=self._written.observed_at,
            after=self._lease if self._told_at_s <= sampled_at_s else "",
        )
        with self._counted("heartbeat"):
            self._lease = self._publisher.heartbeat(self._now(), vouch)
        self._told_at_s = self._monotonic()
        self._beat_at_s = at_s

    @contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        try:
            yield
        except NotDelivered:
            self.writes[what, "failed"] += 1
            raise
        self.writes[what, "accepted"] += 1

    def _held_back_s(self, status: GPUNodeStatus, since_s: float) -> float:
        """Seconds until what the newest status says beyond the last one written may go; infinity
        where it says the same. SM activity never waits for its turn: it rides along."""
        for gap_s in (FREED_EVERY_S, GROWN_EVERY_S):
            if worth_writing(self._written, status, gap_s):
                return max(0.0, gap_s - since_s)
        return math.inf

    def _back_off_s(self) -> float:
        """Doubles up to the longest; half of it by chance, so that 5,000 agents do not agree."""
        longest_s = min(LONGEST_BACK_OFF_S, FIRST_BACK_OFF_S * 2.0 ** min(self._failures - 1, 10))
        return longest_s * self._chance.uniform(0.5, 1.0)
