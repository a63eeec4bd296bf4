"""Counts how often kube-scheduler retries a pod, both if evictions could help and if they could
not.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.e2e.conftest import NewCluster
from tests.e2e.preempting import Batch, Stage
from tests.kubernetes_version import has_backoff_gate

#: The default of Kubernetes, with which back-off does not limit the attempts. The shipped value
#: does.
DEFAULT_GATES = ("SchedulerPopFromBackoffQ=true",)
#: Few nodes, because kube-scheduler starts the list of nodes in its error at a random node.
NODES = [f"gpu-{number:02}" for number in range(1, 25)]
WATCHED_S = 5.0


#: The longest back-off of kube-scheduler by default.
BACK_OFF_S = 10.0


@dataclass(frozen=True, slots=True)
class Calls:
    """The filter calls for an unschedulable pod, in ``WATCHED_S`` or longer on a busy machine."""

    count: int
    watched_s: float

    @property
    def is_limited(self) -> bool:
        """Whether there were at most a few attempts, and then two calls in each back-off."""
        return self.count < 10 + 2 * (self.watched_s - WATCHED_S) / BACK_OFF_S


def filter_calls(new_cluster: NewCluster, scheduler: str, running: Sequence[Batch]) -> Calls:
    """Count the filter calls for an unschedulable pod of 20 GiB."""
    cluster = new_cluster(len(NODES))
    stage = Stage(cluster)
    stage.create_classes()
    url = cluster.start_extender(settings={"preempt_for_memory": True})
    gates = DEFAULT_GATES if has_backoff_gate(scheduler) else ()
    cluster.start_scheduler(url, scheduler, gates=gates)
    cluster.settle()
    stage.run_batch(running)
    began_s = time.monotonic()
    stage.submit("new-0", 20, NODES)
    cluster.until(lambda: bool(cluster.rejection("new-0")), "the pod is rejected")
    time.sleep(WATCHED_S)
    assert len(cluster.bound()) == len(running)
    assert not any(pod["metadata"].get("deletionTimestamp") for pod in cluster.pods())
    return Calls(stage.filter_calls(), time.monotonic() - began_s)
