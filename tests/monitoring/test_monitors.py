"""Runs a real Prometheus with the scrape configurations that the Prometheus Operator generates from
Headroom's monitors.
"""

from collections.abc import Iterator

import pytest

from tests.agent.exporter import StandIn
from tests.history.server import Prometheus, address, prometheus
from tests.monitoring.operator import job
from tests.processes import starts_processes
from tests.waiting import until

CONSOLE = """\
headroom_pod_overuse_bytes{namespace="ml",pod="chat-0",node="gpu-1",device="GPU-a"} 1
headroom_held_gpus{namespace="ml",state="active"} 2
headroom_nodes{state="open"} 3
"""
#: The body of an agent's /metrics. Its last lines come from a node that impersonates other nodes.
AGENT = """\
headroom_pod_peak_bytes{UUID="GPU-a",namespace="ml",pod="chat-0",container="main",pod_uid="u"} 8
headroom_agent_sample_age_seconds 1
headroom_ready{job="headroom-extender"} 1
headroom_held_gpus{namespace="ml",state="active"} 99
up{job="node-exporter",instance="other"} 1
headroom_pod_used_bytes{job="j",instance="i",endpoint="e",node="gpu-2",namespace="ml",pod="p"} 4
headroom_device_used_bytes{UUID="GPU-b"} 5 1000
"""


@pytest.fixture(scope="module")
@starts_processes
def real() -> Iterator[Prometheus]:
    with (
        prometheus() as running,
        StandIn().serving() as console,
        StandIn().serving() as agent,
    ):
        console.text, agent.text = CONSOLE, AGENT
        jobs = [job("headroom-console", address(console))]
        running.scrape([*jobs, job("headroom-agent", address(agent), node="gpu-1")])
        running.run()
        until(lambda: found(running, "headroom_nodes"), "the console is scraped")
        until(lambda: found(running, "headroom_agent_sample_age_seconds"), "the agent is scraped")
        yield running


def found(real: Prometheus, query: str) -> list[dict[str, str]]:
    return [each["metric"] for each in real.ask("query", query=query)["result"]]


def test_metrics_of_the_console_keep_the_names_of_pods(real: Prometheus) -> None:
    (overuse,) = found(real, "headroom_pod_overuse_bytes")
    of_pod = {"namespace": "ml", "pod": "chat-0", "node": "gpu-1", "device": "GPU-a"}
    assert {name: overuse[name] for name in of_pod} == of_pod
    assert [each["namespace"] for each in found(real, "headroom_held_gpus")] == ["ml"]
    assert [each["namespace"] for each in found(real, "headroom_nodes")] == ["headroom-system"]


def test_metrics_of_an_agent_keep_the_names_of_pods(real: Prometheus) -> None:
    (peak,) = found(real, "headroom_pod_peak_bytes")
    of_pod = {"namespace": "ml", "pod": "chat-0", "container": "main", "node": "gpu-1"}
    assert {name: peak[name] for name in of_pod} == of_pod
    (age,) = found(real, "headroom_agent_sample_age_seconds")
    assert (age["namespace"], age["pod"]) == ("headroom-system", "headroom-agent-x2x7f")


def test_a_node_cannot_send_metrics_of_other_programs_or_targets(
    real: Prometheus,
) -> None:
    assert found(real, "headroom_ready") == []
    assert found(real, 'up{instance="other"}') == []
    own = {"job": "headroom-agent", "node": "gpu-1", "endpoint": "metrics-tls"}
    of_agent = found(real, '{__name__=~"headroom_(agent|device|pod)_.*"}')
    of_agent = [each for each in of_agent if each["__name__"] != "headroom_pod_overuse_bytes"]
    assert len(of_agent) == 4  # The device counts too, because its timestamp from 1970 is ignored.
    assert [{name: each[name] for name in own} for each in of_agent] == [own] * 4
    assert {each["instance"] for each in of_agent} != {"i"}
