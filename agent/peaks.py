"""Measures the peaks of containers on devices, and when their use has settled. Pure.

A *life* is one run of a container on one memory. It begins when the container starts, and a restart
of the container begins a new life. The exit of a process does not end the life, so the life of a
notebook includes all of its kernels. If the processes of a memory cannot be attributed, its lives
keep their peaks.

A peak is the maximum of the samples, or the high-water mark of the container's cgroup if the mark
is higher. Only the mark includes peaks between two samples, because the cgroup counts every
allocation. ``peak_partial`` marks a life that had no samples for more than ``MOST_GAP_S``.

Times are seconds since boot, because changes of the wall clock do not affect them. The wall clock
is read only once for each life, to report when the life began.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

import msgspec

from agent.attribution import TOLERANCE_BYTES
from agent.idle import Idle
from agent.probes.readings import Container
from agent.report_rows import Row
from headroom.contract.gpunode import PodUse

#: Maximum number of lives. If there are more, the lives that left the report first are dropped.
MAX_LIVES = 4096
#: Seconds after which a life that is not in the report is forgotten.
FORGOTTEN_AFTER_S = 600.0
#: If no sample is taken for longer than this number of seconds, a peak may have been missed. A
#: restart of the agent takes less time.
MOST_GAP_S = 60.0
#: The use of a starting container has settled if it is above ``SETTLED_ABOVE_BYTES``, and if over
#: ``SETTLED_FOR_S`` seconds its smallest and largest values differ by less than
#: ``SETTLED_WITHIN_RATIO`` of the largest.
SETTLED_ABOVE_BYTES = 64 << 20
SETTLED_WITHIN_RATIO = 0.02
SETTLED_AFTER_S = 20.0

_Key = tuple[str, str, str]


class Life(msgspec.Struct):
    """One run of a container on one memory."""

    uid: str
    memory: str
    #: Name of the container. Empty if its pod holds no replica of the memory.
    container: str
    container_id: str
    #: When the life began (RFC 3339).
    started_at: str
    started_s: float
    #: When the life was last in the report.
    shown_s: float
    #: When the use of the life was last known, or None if it was never known.
    sampled_s: float | None = None
    #: The largest sample in bytes.
    sampled_bytes: int | None = None
    #: High-water mark of the container's cgroup in bytes.
    mark_bytes: int | None = None
    #: The peak at the time when the use settled.
    startup_bytes: int | None = None
    settled_at: str = ""
    #: Whether no sample was missed between the start of the life and the time when its use settled.
    is_start_sampled: bool = True
    is_partial: bool = False
    #: The time since when the use has hardly changed, and the range of the use since that time.
    flat_since_s: float | None = None
    flat_low_bytes: int = 0
    flat_high_bytes: int = 0

    @property
    def key(self) -> _Key:
        return self.uid, self.memory, self.container

    @property
    def source(self) -> Literal["", "driver", "nvml"]:
        """The source of the peak. A mark far below a sample is ignored, because it cannot cover the
        whole memory."""
        if self.mark_bytes and self.mark_bytes + TOLERANCE_BYTES >= (self.sampled_bytes or 0):
            return "driver"
        return "" if self.sampled_bytes is None else "nvml"

    @property
    def peak_bytes(self) -> int | None:
        known = [each for each in (self.sampled_bytes, self.mark_bytes) if each is not None]
        return max(known) if self.source else None

    def sample(self, used_bytes: int, at_s: float) -> None:
        """Add a sample of its use."""
        if self.sampled_s is not None and at_s - self.sampled_s > MOST_GAP_S:
            self._miss()
        self.sampled_s = at_s
        self.sampled_bytes = max(used_bytes, self.sampled_bytes or 0)
        if self.is_start_sampled and not self.settled_at:
            self._settle(used_bytes, at_s)

    def _miss(self) -> None:
        self.is_partial = True
        if not self.settled_at:
            self.is_start_sampled = False

    def _settle(self, used_bytes: int, at_s: float) -> None:
        """Determine whether its use has settled with this sample."""
        if used_bytes <= SETTLED_ABOVE_BYTES:
            self.flat_since_s = None
            return
        low, high = min(used_bytes, self.flat_low_bytes), max(used_bytes, self.flat_high_bytes)
        if self.flat_since_s is None or high - low >= SETTLED_WITHIN_RATIO * high:
            self.flat_since_s = at_s
            self.flat_low_bytes = self.flat_high_bytes = used_bytes
            return
        self.flat_low_bytes, self.flat_high_bytes = low, high
        if at_s - self.flat_since_s >= SETTLED_AFTER_S:
            started_at = datetime.fromisoformat(self.started_at)
            self.settled_at = _rfc3339(started_at + timedelta(seconds=at_s - self.started_s))
            self.startup_bytes = self.peak_bytes


class Lives(msgspec.Struct):
    """All lives of a node, which an agent stores for the next agent."""

    lives: list[Life] = []
    #: When the processes of a memory could last be attributed, by the memory's first device.
    read_s: dict[str, float] = {}
    idle: list[Idle] = []


class Peaks:
    """Measures the lives on one node.

    ``before`` contains the lives that an earlier agent on the node stored, and ``now_s`` is the
    time in seconds since boot. Lives from before the last boot are ignored.
    """

    def __init__(self, before: Lives, now_s: float) -> None:
        newest = sorted(before.lives, key=lambda life: life.shown_s)[-MAX_LIVES:]
        self._lives = {life.key: life for life in newest if life.shown_s <= now_s}
        self._read_s = {memory: at_s for memory, at_s in before.read_s.items() if at_s <= now_s}

    @property
    def lives(self) -> Lives:
        """A copy of the data that the next agent needs."""
        return Lives([msgspec.structs.replace(e) for e in self._lives.values()], {**self._read_s})

    @property
    def state(self) -> int:
        """A counter that increases whenever a peak changes, or a life begins or settles."""
        return hash(
            tuple(
                [
                    (e.container_id, e.memory, e.sampled_bytes, e.mark_bytes, e.settled_at)
                    for e in self._lives.values()
                ]
            )
        )

    def measure(
        self,
        rows: Sequence[Row],
        read: Collection[str],
        marks: Mapping[tuple[str, str], int],
        now_s: float,
        now: datetime,
    ) -> list[PodUse]:
        """Add a sample, and return its rows with their peaks.

        ``read`` contains the first devices of the memories whose processes could be attributed.
        ``marks`` maps (container id, device) to the high-water mark in bytes. ``now_s`` is the time
        of the sample in seconds since boot, and ``now`` its time on the wall clock.
        """
        found = [self._measured(row, marks, now_s, now) for row in rows]
        self._read_s = {
            memory: at_s
            for memory, at_s in (self._read_s | dict.fromkeys(read, now_s)).items()
            if now_s - at_s <= MOST_GAP_S
        }
        if len(self._lives) > MAX_LIVES or any(
            now_s - life.shown_s > FORGOTTEN_AFTER_S for life in self._lives.values()
        ):
            kept = [e for e in self._lives.values() if now_s - e.shown_s <= FORGOTTEN_AFTER_S]
            kept.sort(key=lambda life: life.shown_s)
            self._lives = {life.key: life for life in kept[-MAX_LIVES:]}
        return found

    def _measured(
        self, row: Row, marks: Mapping[tuple[str, str], int], now_s: float, now: datetime
    ) -> PodUse:
        use = row.use
        if not use.uid or not row.is_first:
            return use
        key = use.uid, row.memory, use.container
        life = self._lives.get(key)
        run = row.container
        if run is not None and (
            life is None or (run.id != life.container_id and run.started_s >= life.started_s)
        ):
            life = self._lives[key] = self._begun(key, run, now_s, now)
        if life is None:
            return use
        life.shown_s = now_s
        is_its_own = run is None or run.id == life.container_id
        if row.container_bytes is not None and is_its_own:
            life.sample(row.container_bytes, now_s)
        mark_bytes = marks.get((life.container_id, use.device))
        if mark_bytes is not None:
            life.mark_bytes = max(mark_bytes, life.mark_bytes or 0)
        return msgspec.structs.replace(
            use,
            peak_bytes=life.peak_bytes,
            startup_peak_bytes=_startup_bytes(life),
            peak_source=life.source,
            peak_partial=life.is_partial and life.source == "nvml",
            started_at=life.started_at,
            settled_at=life.settled_at,
        )

    def _begun(self, key: _Key, run: Container, now_s: float, now: datetime) -> Life:
        """Return a new life for a container that was not seen on the memory before."""
        age_s = max(0.0, now_s - run.started_s)
        # A container that started long ago may have used the memory before the agent observed it.
        is_whole = min(age_s, now_s - self._read_s.get(key[1], float("-inf"))) <= MOST_GAP_S
        return Life(
            *key,
            container_id=run.id,
            started_at=_rfc3339(now - timedelta(seconds=age_s)),
            started_s=run.started_s,
            shown_s=now_s,
            is_start_sampled=is_whole,
            is_partial=not is_whole,
        )


def _startup_bytes(life: Life) -> int | None:
    if life.settled_at:
        return life.startup_bytes
    return life.peak_bytes if life.is_start_sampled else None


def _rfc3339(moment: datetime) -> str:
    """Return ``moment`` in UTC with seconds, the format of Kubernetes' Time."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
