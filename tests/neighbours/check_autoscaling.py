"""Tests Headroom with node groups that a real Cluster Autoscaler scales
(docs/how-to/autoscaling.md).
"""

from benchmarks.autoscaling.__main__ import play
from benchmarks.autoscaling.scenarios import SCENARIOS, failures, table
from tests.e2e.conftest import Tell

#: Seconds without a new node or a bound pod after which the remaining pods count as pending
#: forever.
SETTLE_S = 60.0


def test_pods_of_one_size_get_the_nodes_that_they_need(tell: Tell) -> None:
    outcomes = play(SCENARIOS, SETTLE_S)
    for line in table(SCENARIOS, outcomes):
        tell(line)
    assert failures(SCENARIOS, outcomes) == []
