"""Counts how often kube-scheduler 1.38 retries a pod that no eviction would help."""

import pytest

from tests.e2e.conftest import NewCluster, Tell
from tests.e2e.preempting import Batch
from tests.e2e.retries import NODES, filter_calls

pytestmark = pytest.mark.since("1.38")


def test_retries_of_a_pod_that_evictions_cannot_help_are_limited(
    new_cluster: NewCluster, tell: Tell
) -> None:
    running = [Batch(f"a-{node}", node, 0, 4) for node in NODES]
    running += [Batch(f"b-{node}", node, 0, 18, "prod") for node in NODES]
    calls = filter_calls(new_cluster, "kube-scheduler", running)
    tell(f"kube-scheduler 1.38, no eviction would help: {calls.count} filter calls")
    assert calls.is_limited
