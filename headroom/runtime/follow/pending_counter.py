"""Counts the pending pods by the reason why they wait."""

import asyncio
from collections.abc import Callable, Mapping

from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason
from headroom.core.cluster.cluster import Cluster
from headroom.core.journal.journal import Decision
from headroom.core.whatif.pending_pods import Pending, main_reason, rejections_in_condition
from headroom.runtime.loops import Loops

#: Seconds between two counts of the pending pods.
EVERY_S = 1.0
#: Number of pods that are counted before the event loop serves other tasks.
PODS_AT_ONCE = 128


class PendingPods:
    """Counts pending pods. ``decision`` returns the last filter call about a pod, by its uid."""

    def __init__(
        self, cluster: Cluster, decision: Callable[[str], Decision | None] = lambda uid: None
    ) -> None:
        self._cluster = cluster
        self.decision = decision
        #: Each pod and the reasons in its condition, by uid, so that unchanged pods are not parsed
        #: again.
        self._conditions: dict[str, tuple[Pod, dict[Reason, int]]] = {}
        #: The result of the last round. It is replaced as a whole, never changed in place.
        self.pending = Pending()

    def start(self, loops: Loops, unready: Callable[[], str]) -> None:
        loops.start("waiting", self.once, EVERY_S, unready=unready)

    async def once(self) -> list[tuple[Pod, Decision]]:
        """Count the pending pods. Return the pods with a decision that rejected them."""
        unbound = self._cluster.unbound()
        uids = {pod.metadata.uid for pod in unbound}
        self._conditions = {uid: c for uid, c in self._conditions.items() if uid in uids}
        pending = Pending()
        rejected: list[tuple[Pod, Decision]] = []
        for number, pod in enumerate(unbound):
            if number % PODS_AT_ONCE == 0:
                await asyncio.sleep(0)  # lets the event loop serve kube-scheduler's calls
            decision = self.decision(pod.metadata.uid)
            if decision is None:
                rejecting: Mapping[Reason, int] = self._condition_of(pod)
            elif decision.fits:
                continue  # the pod is being bound
            else:
                rejecting = decision.rejected
                rejected.append((pod, decision))
            pending.add(main_reason(rejecting), pod.metadata.creation_timestamp or "")
        self.pending = pending
        return rejected

    def _condition_of(self, pod: Pod) -> dict[Reason, int]:
        uid = pod.metadata.uid
        known = self._conditions.get(uid)
        if known is None or known[0] is not pod:
            known = self._conditions[uid] = pod, rejections_in_condition(pod)
        return known[1]
