"""Decides when to write a status or a heartbeat, and repeats failed writes.

There is no queue. The writer always compares the last *accepted* status with the newest status. So
after a failed write the newest status is not lost, and no older status is sent after it.

A heartbeat confirms the written status. It names the last accepted status and the time of the
newest sample. It is sent only if this sample contains nothing that must be written, apart from SM
activity and peaks. So if status writes fail while the Lease can still be renewed, the node becomes
stale. Otherwise it would seem alive with old figures.

A status is written at most once a second, or once a minute if only SM activity or peaks have
changed. The end of a container's start is written like other changes, because another pod may wait
for it.

If a pod uses more memory than it reserved, extenders may have to evict it within seconds. So the
agent writes any growth on the pod's devices, and confirms every sample while the ledger contains a
decision to evict the pod.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter

import msgspec
import structlog

from agent.kube_publisher import Held, KubernetesPublisher, NotDelivered, NotThereYet
from headroom.contract.gpunode import GPUNodeStatus, PodUse, SmActivity
from headroom.contract.heartbeat import Confirmation

_log = structlog.get_logger()

FIRST_BACK_OFF_S = 1.0
LONGEST_BACK_OFF_S = 30.0

#: Growth of used memory is written if it is at least this large or at least 1 % of the device, but
#: at most every ``GROWN_EVERY_S`` seconds.
GROWN_BYTES = 64 << 20
GROWN_EVERY_S = 5.0
#: Any amount of freed memory is written, because pods may wait for it, but at most once in this
#: number of seconds.
FREED_EVERY_S = 1.0
#: A change of SM activity alone is written if it is at least this large.
SM_MOVED_RATIO = 0.1
#: Minimum number of seconds between two writes if only SM activity or peaks have changed.
ALONE_EVERY_S = 60.0

_ABSENT = -1


@dataclass(frozen=True, slots=True)
class Overuse:
    """The pods of the node that use more memory than they reserved, according to a sample."""

    #: UUIDs of the devices of these pods.
    devices: frozenset[str] = frozenset()
    #: Whether the ledger contains a decision to evict one of the pods.
    decided: bool = False


NO_OVERUSE = Overuse()


class StatusWriter:
    """Writes the newest status and the heartbeats when they are due, and retries failed writes."""

    def __init__(
        self,
        publisher: KubernetesPublisher,
        heartbeat_s: float,
        monotonic: Callable[[], float],
        now: Callable[[], datetime],
        chance: random.Random,
        overuse: Callable[[GPUNodeStatus], Overuse] = lambda _: NO_OVERUSE,
    ) -> None:
        self._publisher = publisher
        self._heartbeat_s = heartbeat_s
        self._monotonic = monotonic
        self._now = now
        self._chance = chance
        self._overuse = overuse
        #: The last accepted status, the version of the GPUNode with this status, and the time of
        #: the write. The status is None if it is unknown which status the API server has.
        self._written: GPUNodeStatus | None = None
        self._held = Held()
        self._written_at_s = 0.0
        self._beat_at_s: float | None = None
        #: The Lease's resourceVersion, and when the API server returned it.
        self._lease = ""
        self._lease_at_s = 0.0
        self._failures = 0
        self._not_before_s = 0.0
        #: Number of writes by (report or heartbeat, accepted or failed).
        self.writes = Counter[tuple[str, str]]()

    def deliver(self, status: GPUNodeStatus, sampled_at_s: float) -> float:
        """Write the status and the heartbeat if they are due. Failed requests are logged, not
        raised.

        ``sampled_at_s`` is the start of the sample on the monotonic clock. Return the number of
        seconds until a new sample is needed because a write was postponed or has failed. Return
        infinity if no sample is needed before the next interval.
        """
        at_s = self._monotonic()
        if self._failures and at_s < self._not_before_s:
            return self._not_before_s - at_s
        overuse = self._overuse(status)
        try:
            self._deliver(status, sampled_at_s, at_s, overuse)
        except NotDelivered as err:
            self._failures += 1
            wait_s = max(self._back_off_s(), err.retry_after_s)
            self._not_before_s = self._monotonic() + wait_s
            event = "gpunode_missing" if isinstance(err, NotThereYet) else "report_not_delivered"
            _log.warning(event, reason=str(err), failures=self._failures, retry_s=round(wait_s, 1))
            return wait_s
        self._failures = 0
        return self._postponed_s(status, at_s - self._written_at_s, overuse.devices)

    def _deliver(
        self, status: GPUNodeStatus, sampled_at_s: float, at_s: float, overuse: Overuse
    ) -> None:
        """Write the status and the heartbeat if due at ``at_s``. Check the status before a
        heartbeat.

        Raises ``NotDelivered``.
        """
        every_s = min(self._heartbeat_s, GROWN_EVERY_S) if overuse.decided else self._heartbeat_s
        beat = self._beat_at_s is None or at_s - self._beat_at_s >= every_s
        if beat and self._written is not None and not self._still_holds(self._written):
            self._written = None
        since_s = at_s - self._written_at_s
        if self._written is None or (
            since_s >= FREED_EVERY_S
            and worth_writing(self._written, status, since_s, overuse.devices)
        ):
            self._report(status, at_s)
        if beat and self._postponed_s(status, 0.0, overuse.devices) == math.inf:
            self._beat(status, sampled_at_s, at_s)

    def _still_holds(self, written: GPUNodeStatus) -> bool:
        """Return whether the API server still has the last written status.

        It does not if the GPUNode was recreated, if another client has written its status, or if an
        older write of this agent arrived late.
        """
        held = self._publisher.held()
        if held == self._held:
            return True
        if held.uid != self._held.uid:
            return False
        # Usually only the reservations have changed.
        held, observed_at = self._publisher.reported()
        if held.uid != self._held.uid or observed_at != written.observed_at:
            return False
        self._held = held
        return True

    def _report(self, status: GPUNodeStatus, at_s: float) -> None:
        # A write without a response may have been accepted. So until the API server responds, no
        # heartbeat may confirm the previous status.
        self._written = None
        with self._counted("report"):
            self._held = self._publisher.report(status)
        self._written, self._written_at_s = status, at_s
        _log.info("report_written", devices=len(status.devices), observed_at=status.observed_at)

    def _beat(self, status: GPUNodeStatus, sampled_at_s: float, at_s: float) -> None:
        assert self._written is not None
        confirmation = Confirmation(
            sampled_at=status.observed_at,
            gpunode=self._held.uid,
            observed_at=self._written.observed_at,
            # The heartbeat names only a version of the Lease that arrived before the sample began.
            after=self._lease if self._lease_at_s <= sampled_at_s else "",
        )
        with self._counted("heartbeat"):
            self._lease = self._publisher.heartbeat(self._now(), confirmation)
        self._lease_at_s = self._monotonic()
        self._beat_at_s = at_s

    @contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        try:
            yield
        except NotDelivered:
            self.writes[what, "failed"] += 1
            raise
        self.writes[what, "accepted"] += 1

    def _postponed_s(
        self, status: GPUNodeStatus, since_s: float, overused: Collection[str]
    ) -> float:
        """Return the number of seconds until ``status`` may be written, or infinity if it need not
        be written because only SM activity and peaks differ. ``since_s`` is the time since the last
        write."""
        for gap_s in (FREED_EVERY_S, GROWN_EVERY_S):
            if worth_writing(self._written, status, gap_s, overused):
                return max(0.0, gap_s - since_s)
        return math.inf

    def _back_off_s(self) -> float:
        """Return the number of seconds until the next attempt. It doubles up to
        ``LONGEST_BACK_OFF_S``.

        Half of the delay is random, so that 5,000 agents do not retry at the same time.
        """
        longest_s = min(LONGEST_BACK_OFF_S, FIRST_BACK_OFF_S * 2.0 ** min(self._failures - 1, 10))
        return longest_s * self._chance.uniform(0.5, 1.0)


def worth_writing(
    before: GPUNodeStatus | None,
    after: GPUNodeStatus,
    since_last_write_s: float,
    overused: Collection[str] = (),
) -> bool:
    """Return whether ``after`` differs enough from ``before`` to be written now.

    ``before`` is the last written status and not the last sample, so slow growth adds up. It is
    None if it is unknown which status the API server has. ``overused`` contains the UUIDs of
    devices on which a pod uses more than it reserved.
    """
    if before is None or _structure(before) != _structure(after):
        return True
    # Other pods may wait for the end of this start, which happens once per run of a container.
    if any(map(_has_settled, before.pods, after.pods)):
        return True
    figures = list(zip(_figures(before), _figures(after), strict=True))
    if since_last_write_s >= FREED_EVERY_S and any(new < old for (old, _), (new, _) in figures):
        return True
    least_bytes = _least_growths(after, overused)
    if since_last_write_s >= GROWN_EVERY_S and any(
        new - old >= least_bytes[device] for (old, _), (new, device) in figures
    ):
        return True
    if since_last_write_s < ALONE_EVERY_S:
        return False
    devices = zip(before.devices, after.devices, strict=True)
    if any(_sm_moved(old.sm_activity, new.sm_activity) for old, new in devices):
        return True
    return any(
        _peak_moved(old, new, least_bytes[new.device])
        for old, new in zip(before.pods, after.pods, strict=True)
    )


def _structure(status: GPUNodeStatus) -> object:
    """Return the status without measured figures and times. Any change of the result is written.

    The result shows whether each figure of used memory is known.
    """
    devices = [
        msgspec.structs.replace(
            device,
            used_bytes=_presence(device.used_bytes),
            unattributed_bytes=_presence(device.unattributed_bytes),
            sm_activity=None,
            sm_occupancy_ratio=None,
            utilization_ratio=None,
        )
        for device in status.devices
    ]
    pods = [_structure_of(pod) for pod in status.pods]
    limits = [msgspec.structs.replace(limit, used_bytes=0) for limit in status.limits]
    conditions = [(c.type, c.status, c.reason, c.message) for c in status.conditions]
    versions = (status.agent_version, status.driver_version, status.cuda_version)
    plugin, sources = status.plugin, status.sources
    summary = msgspec.structs.replace(status.summary, used="", free="")
    return devices, pods, limits, conditions, plugin, sources, summary, versions


def _structure_of(pod: PodUse) -> tuple[object, ...]:
    presence = _presence(pod.used_bytes)
    names = pod.namespace, pod.name, pod.container
    return pod.uid, pod.device, pod.replica, *names, presence, pod.source


def _presence(figure: int | None) -> int:
    """Return a constant that differs between known and unknown figures."""
    return _ABSENT if figure is None or figure < 0 else 0


def _figures(status: GPUNodeStatus) -> list[tuple[int, str]]:
    """Return (used bytes, UUID of the device) of all devices and pods.

    The order depends only on ``_structure``, so the figures of two statuses can be compared.
    """
    return [
        *((device.used_bytes, device.uuid) for device in status.devices),
        *((device.unattributed_bytes or 0, device.uuid) for device in status.devices),
        *((pod.used_bytes or 0, pod.device) for pod in status.pods),
    ]


def _has_settled(old: PodUse, new: PodUse) -> bool:
    """Return whether the container's start has ended since the last written status."""
    return bool(new.settled_at) and new.settled_at != old.settled_at


def _least_growths(status: GPUNodeStatus, overused: Collection[str]) -> Mapping[str, int]:
    """Return the smallest increase in bytes that causes a write, by device UUID (1 for unknown
    devices)."""
    found = defaultdict(lambda: 1)
    for device in status.devices:
        if device.uuid not in overused:
            found[device.uuid] = max(1, min(GROWN_BYTES, -(-device.memory_bytes // 100)))
    return found


def _peak_moved(old: PodUse, new: PodUse, least_bytes: int) -> bool:
    """Return whether a peak has grown by ``least_bytes``, or whether one of its other fields
    differs."""
    if _beside_peak(old) != _beside_peak(new):
        return True
    was, now = old.peak_bytes, new.peak_bytes
    return was is not None and now is not None and now - was >= least_bytes


_beside_peak = attrgetter("started_at", "settled_at", "peak_source", "peak_partial", "idle_since")


def _sm_moved(old: SmActivity | None, new: SmActivity | None) -> bool:
    """Return whether SM activity has changed by ``SM_MOVED_RATIO``, or has another source."""
    if old is None or new is None or old.source != new.source:
        return old != new
    # Round the difference, because tenths are not exact in binary: 0.3 - 0.2 is a little less than
    # 0.1.
    return round(abs(new.ratio - old.ratio), 6) >= SM_MOVED_RATIO
