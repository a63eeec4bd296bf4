"""Turns the agents' reports into lives, and finds out which lives have ended and how."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headroom.contract.annotations import Amount, Bytes, Share
from headroom.contract.gpunode import GPUNodeStatus
from headroom.contract.vramprofile import seconds
from headroom.core.recommend.growth import Growth
from headroom.core.recommend.lives import Ending, Life
from headroom.core.recommend.programs import Family, Program
from headroom.recorder.pod_facts import OOM_KILLED, PodFacts

#: If the reported start time of a container differs by more than this number of seconds, a new
#: life has begun.
SAME_START_S = 1.0
#: The program of a container that its pod does not list, such as an ephemeral container.
_NO_PROGRAM = Program("", Family.UNKNOWN)


@dataclass(frozen=True, slots=True)
class TrackedLife:
    """One life of a container, with its pod, program and device."""

    pod: PodFacts
    container: str
    #: Product name of the devices on which the container runs.
    model: str
    program: Program
    life: Life
    #: Memory of the container's device without the part that the driver uses. 0 for past lives.
    memory_bytes: int = 0
    growth: Growth = field(default_factory=Growth)


Key = tuple[str, str]


class LifeTracker:
    """Follows the lives of all containers on GPUs, by pod uid and container."""

    def __init__(self) -> None:
        self._open: dict[Key, TrackedLife] = {}
        #: The last life that ended for each container of the existing pods.
        self._ended: dict[Key, Life] = {}

    def follow(
        self,
        reports: Mapping[str, GPUNodeStatus],
        pods: Mapping[str, PodFacts],
        gone: Mapping[str, PodFacts],
        now_s: float,
    ) -> list[TrackedLife]:
        """Process the newest reports by node, and return the lives that have ended.

        ``pods`` contains the existing pods by uid, and ``gone`` contains the pods that were deleted
        since the last call. A report counts only for pods that are bound to its node. If no report
        shows a life, the life continues until its pod shows the end of the container or is gone,
        because an agent may stop measuring.
        """
        seen = _seen(reports, {**gone, **pods}, now_s)
        ended: list[TrackedLife] = []
        for key, tracked in list(self._open.items()):
            uid, _ = key
            current = seen.get(key)
            if current is not None and not _is_later(current.life, tracked.life):
                continue
            pod = pods.get(uid) or gone.get(uid) or tracked.pod
            ending = _ending(pod, tracked, uid not in pods, current is not None)
            if ending is None:
                continue
            del self._open[key]
            self._ended[key] = tracked.life
            ended.append(replace(tracked, pod=pod, life=replace(tracked.life, ending=ending)))
        self._ended = {key: life for key, life in self._ended.items() if key[0] in pods}
        for key, current in seen.items():
            last = self._ended.get(key)
            if last is not None and not _is_later(current.life, last):
                continue  # the report repeats a life that is already counted
            before = self._open.get(key)
            if key[0] in pods or before is not None:
                self._open[key] = _highest(current, before)
        return ended

    @property
    def running(self) -> list[TrackedLife]:
        return list(self._open.values())


def _seen(
    reports: Mapping[str, GPUNodeStatus], pods: Mapping[str, PodFacts], now_s: float
) -> dict[Key, TrackedLife]:
    """Return the measured lives in the reports. A container on several devices has one life with
    the highest peak of all its devices, because a request is an amount per device.

    A peak is limited to the memory of its device. Rows with a device that the report does not list
    are ignored.
    """
    found: dict[Key, TrackedLife] = {}
    for node, status in reports.items():
        devices = {device.uuid: device for device in status.devices}
        for use in status.pods:
            started_s = seconds(use.started_at)
            pod, device = pods.get(use.uid), devices.get(use.device)
            if pod is None or pod.node != node or device is None:
                continue
            memory_bytes = device.memory_bytes - max(0, device.reserved_bytes)
            if not use.container or not use.peak_bytes or not started_s or memory_bytes <= 0:
                continue
            peak_bytes = min(use.peak_bytes, memory_bytes)
            startup_bytes = use.startup_peak_bytes if use.settled_at else None
            if startup_bytes is not None:
                startup_bytes = min(startup_bytes, memory_bytes)
            life = Life(
                peak_bytes,
                started_s,
                now_s,
                None,
                startup_bytes,
                use.peak_partial,
                requested_bytes=_bytes_of(pod.requests.get(use.container), memory_bytes),
            )
            program = pod.programs.get(use.container, _NO_PROGRAM)
            tracked = TrackedLife(pod, use.container, device.model, program, life, memory_bytes)
            key = (use.uid, use.container)
            found[key] = _highest(tracked, found.get(key))
    return found


def _bytes_of(amount: Amount | None, memory_bytes: int) -> int:
    """Return the amount that the pod's author requests on a device, in bytes, or 0 if there is no
    request."""
    if isinstance(amount, Share):
        return memory_bytes * amount.ppm // 1_000_000
    return amount.count_bytes if isinstance(amount, Bytes) else 0


def _highest(one: TrackedLife, other: TrackedLife | None) -> TrackedLife:
    """Merge two records of the same life, and keep the higher value of each peak.

    A startup peak is kept if one of the records has it, because an agent that has restarted may not
    have measured it.
    """
    if other is None:
        return one
    first, second = one.life, other.life
    startups = [first.startup_peak_bytes, second.startup_peak_bytes]
    peak_bytes = max(first.peak_bytes, second.peak_bytes)
    started_s, until_s = min(first.started_s, second.started_s), max(first.until_s, second.until_s)
    growth = other.growth.until(until_s - started_s, peak_bytes)
    life = Life(
        peak_bytes,
        started_s,
        until_s,
        None,
        max((each for each in startups if each is not None), default=None),
        first.partial or second.partial,
        growth.unsettled,
        growth.first_bytes,
        first.requested_bytes,
    )
    return replace(one, life=life, growth=growth)


def _is_later(life: Life, before: Life) -> bool:
    return life.started_s > before.started_s + SAME_START_S


def _ending(pod: PodFacts, tracked: TrackedLife, is_gone: bool, restarted: bool) -> Ending | None:
    """Return how a life ended that reports no longer show, or None if it may still run."""
    end = pod.ends.get(tracked.container)
    if end is not None and end.finished_s < tracked.life.started_s - SAME_START_S:
        end = None  # the end of an earlier life
    if end is None and not is_gone:
        return Ending.UNKNOWN if restarted else None
    if end is not None and end.reason == OOM_KILLED:
        return Ending.OOM_KILLED
    if end is not None and end.exit_code == 0:
        return Ending.COMPLETED
    if pod.disrupted:
        return Ending.EVICTED
    if pod.deleting or (is_gone and end is None):
        return Ending.COMPLETED
    return Ending.FAILED
