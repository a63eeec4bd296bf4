"""Ends the start phase of pods that start alone, so that the next such pod can use their device.

Each replica checks the nodes once per second and writes by compare-and-swap. So exactly one replica
writes the end of a start, counts it and writes the Event. The write makes the device available to
pending pods, which ``requeue.controller`` then requeues.
"""

import asyncio
import time
from collections.abc import Callable, Collection

import structlog

from extender.event_recorder import EventRecorder
from extender.ledger.ledger import Ledger
from extender.metrics import Telemetry
from headroom.contract.annotations import STARTUP, STARTUP_TIMEOUT
from headroom.contract.event_reasons import EventReason
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Pod
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.notices import Notice, pod_notice
from headroom.core.starting_alone.decisions import EndedStart, ended_starts
from headroom.core.starting_alone.phase import StartEnd, stuck_reason
from headroom.errors import StoreError
from headroom.runtime.loops import Loops

log = structlog.get_logger()

EVERY_S = 1.0


class StartsController:
    """Checks the nodes with starting pods once a second. A failure is retried in the next round."""

    def __init__(
        self,
        cluster: Cluster,
        ledger: Ledger,
        telemetry: Telemetry,
        event_recorder: EventRecorder,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._wall_s = wall_s
        self._cluster = cluster
        self._reservations = ledger.reservations
        self._telemetry = telemetry
        self._event_recorder = event_recorder

    def start(self, loops: Loops, unready: Callable[[], str]) -> None:
        loops.start("starts", self.once, EVERY_S, unready=unready)

    async def once(self) -> None:
        for name in self._cluster.starting.nodes():
            gpunode = self._cluster.gpunode(name)
            if gpunode is not None and ended_starts(self._cluster, gpunode, self._wall_s()):
                try:
                    await self._end(name)
                except StoreError as err:
                    log.warning("start_not_ended", node=name, message=str(err))
            await asyncio.sleep(0)  # lets the event loop serve calls

    async def _end(self, node: str) -> None:
        """End the starts according to the newest version of the GPUNode."""
        found: dict[str, EndedStart] = {}

        def ended(gpunode: GPUNode) -> Collection[str]:
            nonlocal found
            found = ended_starts(self._cluster, gpunode, self._wall_s())
            return found

        for uid in await self._reservations.end_starts(node, ended):
            await self._announce(node, uid, found[uid])

    async def _announce(self, node: str, uid: str, start: EndedStart) -> None:
        end, age_s = start.end, start.age_s or 0.0
        self._telemetry.starts.labels(end.value).observe(max(0.0, age_s))
        log.info("start_ended", node=node, pod_uid=uid, end=end.value, age_s=round(age_s, 1))
        pod = self._cluster.pod(uid)
        if pod is not None and (notice := start_notice(pod, start)) is not None:
            await self._event_recorder.write(notice)


def start_notice(pod: Pod, start: EndedStart) -> Notice | None:
    """Return the notice about a start that failed, or None if the start ended normally."""
    after = f"{start.age_s or 0.0:.0f} s after its bind"
    opened = f"Other pods with annotation {STARTUP}: alone may start on its GPU now"
    if start.end is StartEnd.TIMED_OUT:
        message = (
            f"This pod is still starting {after}: a GPU container is not ready or has no readiness "
            f"or startup probe, and its GPU memory use has not settled. {opened}. If it needs more "
            f"time, set a longer timeout. Example: {STARTUP_TIMEOUT}: 20m"
        )
        return pod_notice(pod, EventReason.START_TIMED_OUT, message, key="")
    if start.end is StartEnd.STUCK:
        message = (
            f"The kubelet cannot start this pod's containers {after} ({stuck_reason(pod)}). "
            f"{opened}. Correct the pod's image or configuration."
        )
        return pod_notice(pod, EventReason.START_STUCK, message, key="")
    return None
