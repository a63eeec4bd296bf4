"""Checks that docs/reference/metrics.md matches real scrapes, and that promtool has no
complaints.
"""

import http.client
import re
from collections.abc import Callable

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.monitoring.conftest import TroubledFleet
from tests.monitoring.documented import documented
from tests.monitoring.test_rules import alerts
from tests.promtool import complaints
from tests.waiting import PATIENCE_S, until

#: Metrics that this fleet cannot have. A steering agent needs a kubelet and a cluster. The webhook,
#: the recorder and the device taint controller need a cluster and have their own tests
#: (tests/admission/test_served.py, tests/recorder/test_rounds.py,
#: tests/controllers/test_device_taints.py). The fleet also has no separate console.
ELSEWHERE = {
    *("headroom_agent_steered_total", "headroom_console_ready"),
    *documented("The webhook"),
    *documented("The recorder"),
    *documented("The controller of device taints"),
}
#: Metrics of events that do not occur, or occur late, in this fleet. Their labels may be missing.
UNSEEN = {
    "headroom_unmanaged_gpu_nodes",
    "headroom_crashed_on_overcommitted_bytes",
    "headroom_held_gpus",
    "headroom_held_bytes",
    "headroom_idle_gpus",
    "headroom_idle_held_bytes",
    "headroom_certificate_end_timestamp_seconds",
    "headroom_events_total",
    "headroom_report_age_seconds",
    "headroom_device_sm_occupancy_ratio",
    "headroom_device_utilization_ratio",
    "headroom_pod_sm_activity_ratio",
}
#: Suffixes that a histogram adds to its name.
_LE = {"le"}


def text_of(world: TroubledFleet) -> tuple[str, str]:
    """Return the metrics of the extender and the agent after the first sample."""
    connection = http.client.HTTPConnection(world.agent, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/metrics")
        agent = connection.getresponse().read().decode()
    finally:
        connection.close()
    return world.extender.get("/metrics").body.decode(), agent


@pytest.fixture(scope="module")
def scrapes(world: TroubledFleet) -> tuple[str, str]:
    def shows(number: int, line: str) -> Callable[[], bool]:
        return lambda: line in text_of(world)[number]

    until(shows(0, "headroom_pod_overuse_bytes{"), "overuse is reported")
    # Other tests of this fleet may have offered other pods that fit on no node.
    until(shows(0, 'headroom_pending_pods{reason="memory_on_any"} '), "the pending pod is shown")
    until(shows(1, "headroom_device_sm_activity_ratio{"), "the agent has two samples")
    return text_of(world)


def full_name(family: Metric) -> str:
    return family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")


def families(scrapes: tuple[str, str]) -> dict[str, Metric]:
    found = [f for text in scrapes for f in text_string_to_metric_families(text)]
    named = {full_name(f): f for f in found}
    assert len(named) == len(found), "told twice"
    return named


def test_the_docs_list_exactly_the_exposed_metrics(scrapes: tuple[str, str]) -> None:
    shown = families(scrapes)
    assert documented().keys() - ELSEWHERE == shown.keys()
    for name, family in shown.items():
        assert documented()[name].type == family.type, name


def test_the_docs_list_the_labels(scrapes: tuple[str, str]) -> None:
    shown = families(scrapes)
    for name, family in shown.items():
        if labels_of(family) or name not in UNSEEN:
            assert labels_of(family) == documented()[name].labels, name


def labels_of(family: Metric) -> set[str]:
    return {label for s in family.samples for label in s.labels} - _LE


def test_each_metric_without_labels_has_a_value(scrapes: tuple[str, str]) -> None:
    for name, family in families(scrapes).items():
        if not documented()[name].labels:
            assert family.samples, name


def test_the_docs_list_the_alerts_of_each_metric() -> None:
    used: dict[str, set[str]] = {}
    for alert, rule in alerts().items():
        for name in set(re.findall(r"headroom_\w+", str(rule["expr"]))):
            used.setdefault(re.sub("_(bucket|count)$", "", name), set()).add(alert)
    for name, row in documented().items():
        assert row.alerts == used.get(name, set()), name
    assert used.keys() <= documented().keys()


def test_promtool_finds_no_fault(scrapes: tuple[str, str]) -> None:
    assert [complaints(text) for text in scrapes] == [[], []]


def test_devices_beyond_the_limit_of_series_are_counted(scrapes: tuple[str, str]) -> None:
    """The limit in this fleet is three of the four devices."""
    shown = families(scrapes)
    devices = {s.labels["device"] for s in shown["headroom_ledger_device_headroom_bytes"].samples}
    assert devices == {"GPU-broken-0", "GPU-broken-1", "GPU-shared-0"}
    (left_out,) = shown["headroom_ledger_devices_left_out"].samples
    (fleet,) = shown["headroom_fleet_devices"].samples
    assert (left_out.value, fleet.value) == (1, 4)
