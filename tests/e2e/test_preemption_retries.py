"""Counts how often kube-scheduler retries a pod if filter returns nodes on which evictions could
help.

Versions before 1.38 do not call preempt for such nodes. Each attempt changes the pod's message,
which causes the next attempt.
"""

import pytest

from tests.e2e.conftest import NewCluster, Tell
from tests.e2e.preempting import Batch
from tests.e2e.retries import NODES, filter_calls
from tests.kubernetes_version import SCHEDULERS, is_at_least

#: The two newest versions that do not call preempt for such nodes.
OLDER = SCHEDULERS[-3:-1] if is_at_least("1.38") else SCHEDULERS[-2:]


@pytest.mark.parametrize("scheduler", OLDER)
def test_an_older_version_limits_its_retries(
    new_cluster: NewCluster, scheduler: str, tell: Tell
) -> None:
    running = [Batch(f"a-{node}", node, 0, 20) for node in NODES]
    calls = filter_calls(new_cluster, scheduler, running)
    tell(f"{scheduler} with preempt_for_memory: {calls.count} filter calls")
    assert calls.is_limited
