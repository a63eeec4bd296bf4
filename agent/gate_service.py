"""Answers gated pods, based on the ledger at the API server, the newest sample and the open gates.

The GPUNode is read at most once a second, no matter how many pods ask, so the copy may lack newer
reservations. A missing reservation cannot make a "yes" wrong. The copy already shows the pod on its
devices, and an extender that reserves later has seen this version or a newer one.
"""

import threading
from collections.abc import Callable

import structlog

from agent.gate_decision import LIMITS_UNKNOWN, Verdict, judge, limits
from agent.gate_starts import GateStarts
from agent.kube_publisher import KubernetesPublisher, NotDelivered
from headroom.contract.errors import BadReport
from headroom.contract.gpunode import GPUNode, GPUNodeStatus

_log = structlog.get_logger()

#: Minimum number of seconds between two reads of the GPUNode.
READ_EVERY_S = 1.0


class GateService:
    """Decides for each gated pod whether it may start.

    ``sample`` returns the newest sample, or None if it is stale. ``reserve_bytes`` returns the
    memory that the node's annotation keeps free on every device, or None if it is unknown.
    """

    def __init__(
        self,
        ledger: KubernetesPublisher,
        sample: Callable[[], GPUNodeStatus | None],
        reserve_bytes: Callable[[], int | None],
        monotonic: Callable[[], float],
        starts: GateStarts,
    ) -> None:
        self._ledger = ledger
        self._sample = sample
        self._reserve_bytes = reserve_bytes
        self._monotonic = monotonic
        self._starts = starts
        self._lock = threading.Lock()
        self._read_at_s: float | None = None
        self._read: GPUNode | None = None
        self._why_not = ""

    def ask(self, uid: str) -> Verdict:
        """Return whether the pod with this uid may start. Raises nothing."""
        # Decide one pod at a time, because each decision depends on the earlier decisions.
        with self._lock:
            now_s = self._monotonic()
            if self._read_at_s is None or now_s - self._read_at_s >= READ_EVERY_S:
                self._read_ledger()
                self._read_at_s = self._monotonic()
            # Take the sample after the read, so that it is at least as new as the status in the
            # GPUNode.
            sample, known = self._sample(), limits(self._reserve_bytes())
            if self._read is None:
                return Verdict("not yet", self._why_not)
            if sample is None:
                return Verdict("not yet", "there is no fresh sample of the devices")
            if known is None:
                return Verdict("not yet", LIMITS_UNKNOWN)
            gates = self._starts.ask(uid, self._read.spec.reservations, sample.pods)
            verdict = judge(self._read, sample, uid, known, gates)
            if verdict.answer == "yes":
                self._starts.open(uid, self._read.spec.reservations[uid], sample.pods)
            return verdict

    def _read_ledger(self) -> None:
        try:
            self._read = self._ledger.gpunode()
            self._why_not = "there is no GPUNode for this node"
        except (NotDelivered, BadReport) as err:
            _log.warning("ledger_not_read", reason=str(err))
            self._read, self._why_not = None, "the ledger cannot be read"
