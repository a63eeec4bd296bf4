"""Answers gated pods: asks the API server for the ledger, seldom, and goes by the newest sample.

However many pods ask, the GPUNode is read at most once a second. One that is a second old may be
short of promises made since, but those were weighed on a version that shows the pod where it is.
"""

import threading
from collections.abc import Callable
from typing import Protocol

import structlog

from agent.gate_decision import LIMITS_UNKNOWN, Verdict, judge, limits
from agent.status.writer import NotDelivered
from contract.errors import BadReport
from contract.gpunode import GPUNode, GPUNodeStatus

_log = structlog.get_logger()

READ_EVERY_S = 1.0


class Ledger(Protocol):
    def gpunode(self) -> GPUNode | None:
        """Our own GPUNode, not from a cache. Raises ``NotDelivered`` and ``BadReport``."""
        ...


class GateService:
    """``sample`` is the newest one, None where it is not fresh; ``reserve_bytes`` what the node's
    annotation keeps free on every device, None where that is not known."""

    def __init__(
        self,
        ledger: Ledger,
        sample: Callable[[], GPUNodeStatus | None],
        reserve_bytes: Callable[[], int | None],
        monotonic: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._sample = sample
        self._reserve_bytes = reserve_bytes
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._read_at_s: float | None = None
        self._read: GPUNode | None = None
        self._why_not = ""

    def ask(self, uid: str) -> Verdict:
        """Raises nothing."""
        with self._lock:
            now_s = self._monotonic()
            if self._read_at_s is None or now_s - self._read_at_s >= READ_EVERY_S:
                self._read_ledger()
                self._read_at_s = self._monotonic()
            node, why_not = self._read, self._why_not
        # Only now: a sample that is newer than what was read shows no less of who holds what.
        sample, known = self._sample(), limits(self._reserve_bytes())
        if node is None:
            return Verdict("not yet", why_not)
        if sample is None:
            return Verdict("not yet", "there is no fresh sample of the devices")
        if known is None:
            return Verdict("not yet", LIMITS_UNKNOWN)
        return judge(node, sample, uid, known)

    def _read_ledger(self) -> None:
        try:
            self._read = self._ledger.gpunode()
            self._why_not = "there is no GPUNode for this node"
        except (NotDelivered, BadReport) as err:
            _log.warning("ledger_not_read", reason=str(err))
            self._read, self._why_not = None, "the ledger cannot be read"
