"""How often kube-scheduler retries a pod for which filter names nodes where evictions could help.

Versions before 1.38 do not call preempt for such nodes. Each of their attempts changes the message
of the pod, which causes the next attempt.
"""

import time
from collections.abc import Sequence

import pytest

from tests.e2e.conftest import NewCluster, Tell
from tests.e2e.preempting import Batch, Stage
from tests.kubernetes_version import PRE_RELEASE, SCHEDULERS

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
    cluster.start_scheduler(url, scheduler, gates=DEFAULT_GATES)
    cluster.settle()
    stage.run_batch(running)
    stage.submit("new-0", 20, NODES)
    cluster.until(lambda: bool(cluster.rejection("new-0")), "the pod is rejected")
    time.sleep(WATCHED_S)
    assert len(cluster.bound()) == len(running)
    assert not any(pod["metadata"].get("deletionTimestamp") for pod in cluster.pods())
    return stage.filter_calls()


@pytest.mark.parametrize("scheduler", SCHEDULERS[-2:])
def test_an_older_version_does_not_retry_without_end(
    new_cluster: NewCluster, scheduler: str, tell: Tell
) -> None:
    running = [Batch(f"a-{node}", node, 0, 20) for node in NODES]
    calls = filter_calls(new_cluster, scheduler, running)
    tell(f"{scheduler} with preempt_for_memory: {calls} filter calls")
    assert calls < 10


def test_a_pod_that_evictions_do_not_help_is_not_retried_without_end(
    new_cluster: NewCluster, tell: Tell
) -> None:
    running = [Batch(f"a-{node}", node, 0, 4) for node in NODES]
    running += [Batch(f"b-{node}", node, 0, 18, "prod") for node in NODES]
    calls = filter_calls(new_cluster, PRE_RELEASE, running)
    tell(f"kube-scheduler 1.38, no eviction would help: {calls} filter calls")
    assert calls < 10
