"""Counts how often kube-scheduler retries an unschedulable pod."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.e2e.conftest import NewCluster
from tests.e2e.preempting import Batch, Stage
from tests.kubernetes_version import has_backoff_gate

#: The default feature gates of Kubernetes, with which the back-off does not limit the attempts.
#: With the shipped gates, the back-off limits them.
DEFAULT_GATES = ("SchedulerPopFromBackoffQ=true",)
#: The cluster is small, because the list of nodes in kube-scheduler's error starts at a random
#: node.
NODES = [f"gpu-{number:02}" for number in range(1, 25)]
WATCHED_S = 5.0


#: The default maximum back-off of kube-scheduler.
BACK_OFF_S = 10.0


@dataclass(frozen=True, slots=True)
class Calls:
    """The filter calls for an unschedulable pod within ``watched_s``. On a busy machine, this time
    is longer than ``WATCHED_S``.
    """

    count: int
    watched_s: float

    @property
    def is_limited(self) -> bool:
        """Return whether there were only a few attempts, followed by at most two calls per
        back-off.
        """
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
