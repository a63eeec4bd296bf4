"""Counts how often kube-scheduler retries a pod, both if evictions could help and if they could
not.
"""

import time
from collections.abc import Sequence

from tests.e2e.conftest import NewCluster
from tests.e2e.preempting import Batch, Stage
from tests.kubernetes_version import has_backoff_gate

#: The default of Kubernetes, with which back-off does not limit the attempts. The shipped value
#: does.
DEFAULT_GATES = ("SchedulerPopFromBackoffQ=true",)
#: Few nodes, because kube-scheduler starts the list of nodes in its error at a random node.
NODES = [f"gpu-{number:02}" for number in range(1, 25)]
WATCHED_S = 5.0


def filter_calls(new_cluster: NewCluster, scheduler: str, running: Sequence[Batch]) -> int:
    """Return the number of filter calls for an unschedulable pod of 20 GiB within ``WATCHED_S``."""
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
