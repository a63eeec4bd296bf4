"""Counts how often kube-scheduler retries a pod that evictions could or could not help."""

import time
from collections.abc import Sequence

from tests.e2e.conftest import NewCluster
from tests.e2e.preempting import Batch, Stage
from tests.kubernetes_version import has_backoff_gate

#: Kubernetes' default. Unlike with the shipped value, no back-off limits the attempts.
DEFAULT_GATES = ("SchedulerPopFromBackoffQ=true",)
#: kube-scheduler lists the nodes of its error from a random one on, so few nodes end the retries.
NODES = [f"gpu-{number:02}" for number in range(1, 25)]
WATCHED_S = 5.0


def filter_calls(new_cluster: NewCluster, scheduler: str, running: Sequence[Batch]) -> int:
    """The filter calls for a rejected pod of 20 GiB, until ``WATCHED_S`` after its rejection."""
    cluster = new_cluster(len(NODES))
    stage = Stage(cluster)
    stage.create_classes()
    url = cluster.start_extender(settings={"preempt_for_memory": True})
    gates = DEFAULT_GATES if has_backoff_gate(scheduler) else ()
    cluster.start_scheduler(url, scheduler, gates=gates)
    cluster.settle()
    stage.run_batch(running)
    stage.submit("new-0", 20, NODES)
    cluster.until(lambda: bool(cluster.rejection("new-0")), "the pod is rejected")
    time.sleep(WATCHED_S)
    assert len(cluster.bound()) == len(running)
    assert not any(pod["metadata"].get("deletionTimestamp") for pod in cluster.pods())
    return stage.filter_calls()
