"""Tests the log event of filter."""

import itertools
import json

import pytest
from structlog.testing import capture_logs

from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.journal.journal import Journal
from headroom.core.placement.policy import Rules
from tests.builders import DISTRIBUTED, NOW_S
from tests.scheduler.verbs_on import verbs_on
from tests.serving import offer, pod
from tests.state.evictions import full_node
from tests.state.states import EPOCH_S, STALE_AFTER_S


def test_filter_logs_its_duration_in_milliseconds() -> None:
    cluster, journal = ClusterWriter(Rules(), STALE_AFTER_S, EPOCH_S), Journal()
    cluster.apply(full_node("n", plugin=DISTRIBUTED))
    seconds = itertools.count(NOW_S)  # The clock advances by a second with each call.
    verbs = verbs_on(cluster, lambda: next(seconds), journal=journal, epoch_s=EPOCH_S)
    with capture_logs() as logs:
        verbs.filter(json.dumps(offer(pod("p", "8Gi"), "n")).encode())
    (event,) = (each for each in logs if each["event"] == "filtered")
    decision = journal.of_uid("uid-p")
    assert decision is not None
    assert decision.took_s >= 1.0
    assert event["took_ms"] == pytest.approx(1000.0 * decision.took_s, abs=0.5)
