"""Binds pods for kube-scheduler: passes each call to the ledger, and records the outcome."""

import time
from collections.abc import Callable, Sequence

from contract.gpunode import GPUNode
from contract.kube import Pod
from contract.reasons import Reason
from extender.ledger.protocol import BindAsk, Bound, Declined, Ledger
from extender.observability.metrics import Telemetry
from extender.observability.recorder import record_bind
from extender.placement.placement_record import Placement
from extender.scheduler.extender_v1 import BindArgs
from extender.state.changes import BindBegun, BindEnded, Event, GPUNodeSeen
from extender.state.cluster_state import ClusterState
from extender.state.journal import Journal
from extender.state.node_whatif import rejection_beside
from extender.state.reconcile_queue import knows_devices


class LedgerCache:
    """The state of this process as the ledger uses it: to judge pods, and to show its writes to the
    next decision at once. ``deliver`` applies changes."""

    def __init__(self, cluster: ClusterState, deliver: Callable[[Sequence[Event]], None]) -> None:
        self._cluster = cluster
        self._deliver = deliver

    def judge(self, pod: Pod, gpunode: GPUNode) -> Placement | Reason:
        """Fit the pod on exactly this version of the GPUNode, beside the pods for which the node is
        held. Filter may have passed the pod before it was held."""
        now_s, node = time.monotonic(), gpunode.name
        held_for = self._cluster.held_for(pod, now_s).get(node, ())
        taken = rejection_beside(self._cluster, pod, node, held_for, now_s) if held_for else None
        return taken or self._cluster.judge(pod, gpunode, now_s)

    def judge_as_weighed(
        self, pod: Pod | None, gpunode: GPUNode | None, now_s: float
    ) -> Placement | None:
        """Return the placement that ``judge`` would return, if it can be derived from the last
        weighing. Only the thread that owns the state may call this."""
        if pod is None or gpunode is None or gpunode.name in self._cluster.held_for(pod, now_s):
            return None
        return self._cluster.judge_as_weighed(pod, gpunode, now_s)

    def knows_devices(self, gpunode: GPUNode) -> bool:
        return knows_devices(self._cluster, gpunode)

    def written(self, gpunode: GPUNode) -> None:
        self._deliver([GPUNodeSeen(gpunode, time.monotonic())])

    def begin(self, pod: Pod, node: str, placement: Placement | None) -> None:
        self._deliver([BindBegun(pod, node, placement)])

    def end(self, uid: str, node: str) -> None:
        self._deliver([BindEnded(uid, node)])


class Binder:
    """Answers bind calls. ``deadline_s``: how long kube-scheduler waits for the answer."""

    def __init__(
        self,
        cache: LedgerCache,
        ledger: Ledger,
        journal: Journal,
        telemetry: Telemetry,
        deadline_s: float,
    ) -> None:
        self._cache = cache
        self._ledger = ledger
        self._journal = journal
        self._telemetry = telemetry
        self._deadline_s = deadline_s

    async def bind(self, args: BindArgs, pod: Pod | None, gpunode: GPUNode | None) -> str:
        """Bind a pod; return "" if it is bound, else the reason as a sentence.

        ``pod`` and ``gpunode`` are the objects of this process; None if it does not have them.
        """
        began_s = time.monotonic()
        placement = self._cache.judge_as_weighed(pod, gpunode, began_s)
        ask = BindAsk(
            args.pod_namespace,
            args.pod_name,
            args.pod_uid,
            args.node,
            pod,
            gpunode,
            placement,
            until_s=began_s + self._deadline_s,
        )
        if pod is not None:
            self._cache.begin(pod, ask.node, placement)
        try:
            outcome = await self._ledger.bind(ask)
        finally:
            self._cache.end(ask.uid, ask.node)
        took_s = time.monotonic() - began_s
        record_bind(self._journal, self._telemetry, ask, outcome, took_s)
        if isinstance(outcome, Bound):
            return ""
        return outcome.reason.sentence if isinstance(outcome, Declined) else outcome.message
