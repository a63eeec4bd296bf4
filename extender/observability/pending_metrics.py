"""Counts the pods that no node has, by the reason for which they wait."""

import asyncio
from collections.abc import Callable, Mapping

from contract.kube import Pod
from contract.reasons import Reason
from extender.periodic import Loops
from extender.state.cluster_state import ClusterState
from extender.state.journal import Decision
from extender.state.pending_pods import Pending, main_reason, rejections_in_condition

#: Between two rounds.
EVERY_S = 1.0
#: Pods that are looked at before others have a turn.
LOOKED_AT_TOGETHER = 128


def no_decision(uid: str) -> Decision | None:
    return None


class PendingPods:
    """``decision`` returns the last filter call about the pod of a uid."""

    def __init__(
        self, cluster: ClusterState, decision: Callable[[str], Decision | None] = no_decision
    ) -> None:
        self._cluster = cluster
        self.decision = decision
        #: Uid -> a pod, and what its condition says.
        self._conditions: dict[str, tuple[Pod, dict[Reason, int]]] = {}
        #: As of the last round; replaced, never changed in place.
        self.pending = Pending()

    def start(self, loops: Loops, unready: Callable[[], str]) -> None:
        loops.start("waiting", self.once, EVERY_S, unready=unready)

    async def once(self) -> list[tuple[Pod, Decision]]:
        """Count them, and return those that were rejected by a decision that is known."""
        unbound = self._cluster.unbound()
        there = {pod.metadata.uid for pod in unbound}
        self._conditions = {uid: c for uid, c in self._conditions.items() if uid in there}
        pending = Pending()
        rejected: list[tuple[Pod, Decision]] = []
        for number, pod in enumerate(unbound):
            if number % LOOKED_AT_TOGETHER == 0:
                await asyncio.sleep(0)  # kube-scheduler's calls do not wait for all of them
            decision = self.decision(pod.metadata.uid)
            if decision is None:
                refused: Mapping[Reason, int] = self._said(pod)
            elif decision.fits:
                continue  # it is being bound
            else:
                refused = decision.rejected
                rejected.append((pod, decision))
            pending.add(main_reason(refused), pod.metadata.creation_timestamp or "")
        self.pending = pending
        return rejected

    def _said(self, pod: Pod) -> dict[Reason, int]:
        uid = pod.metadata.uid
        known = self._conditions.get(uid)
        if known is None or known[0] is not pod:
            known = self._conditions[uid] = pod, rejections_in_condition(pod)
        return known[1]
