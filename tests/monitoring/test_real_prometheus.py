"""Runs every query of the dashboard and every rule in a real Prometheus on real scrapes."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from headroom.webhook.metrics import WebhookTelemetry
from tests.debian import Unavailable
from tests.history.server import Prometheus, prometheus
from tests.monitoring.conftest import TroubledFleet
from tests.monitoring.test_rules import DOCS, RULES, alerts
from tests.serving import offer, pod
from tests.waiting import until

PAGE = Path(__file__).parents[2] / "headroom/console/page"
DASHBOARD = Path(__file__).parents[2] / "deploy/components/dashboard/headroom.json"
#: Alerts about faults of this fleet that fire immediately.
ACTIVE = {
    "HeadroomOvercommitted",
    "HeadroomPodOveruse",
    "HeadroomGPUUnhealthy",
    "HeadroomUnattributedMemory",
    "HeadroomPodsPendTooLong",
}
#: Alerts that need a rising rate or a slow machine.
MAY_BE_ACTIVE = {"HeadroomPredictionMisses", "HeadroomSlow", "HeadroomLoopLag"}


def panels() -> list[dict[str, Any]]:
    found = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


#: The variables of the dashboard that select series.
VARIABLES = ("cluster", "model", "node", "namespace")


def chosen(promql: str, **values: str) -> str:
    """Return the query that Grafana sends for these values of variables.

    It sends .* if all values of a variable are selected.
    """
    for name in VARIABLES:
        promql = promql.replace(f"${name}", values.get(name, ".*"))
    return promql


QUERIES = {
    f"{panel['title']}: {target['refId']}": chosen(target["expr"])
    for panel in panels()
    for target in panel["targets"]
}


@pytest.fixture(scope="module")
def real(world: TroubledFleet) -> Iterator[Prometheus]:
    try:
        with prometheus(world.port) as running, webhook_metrics() as webhook:
            extender = world.extender.debug.removeprefix("http://")
            targets = {"targets": [extender, world.agent, webhook]}
            running.scrape([{"job_name": "headroom", "static_configs": [targets]}], RULES)
            running.run()
            asked = 'headroom_history_queries_total{outcome="answered"} > 0'
            until(lambda: answered(running, asked), "the extender has asked it for history")
            yield running
    except Unavailable as err:
        pytest.skip(f"needs a real Prometheus: {err}")


@contextlib.contextmanager
def webhook_metrics() -> Iterator[str]:
    """Serve the metrics of a ready webhook, a ready console and a leading recorder, which all need
    a cluster, and GPUs that a team holds, which the extender reports minutes later. Yield their
    URLs.
    """
    telemetry = WebhookTelemetry(CollectorRegistry())
    telemetry.ready.set(1)
    ready = Gauge("headroom_console_ready", "As of a console.", registry=telemetry.registry)
    ready.set(1)
    leads = Gauge("headroom_recorder_leads", "As of a recorder.", registry=telemetry.registry)
    leads.set(1)
    labels = ("namespace", "state")
    gpus = Gauge("headroom_held_gpus", "As of a console.", labels, registry=telemetry.registry)
    memory = Gauge("headroom_held_bytes", "As of a console.", labels, registry=telemetry.registry)
    for state in ("active", "idle", "unmeasured"):
        gpus.labels("ml", state).set(1)
    for state in ("used", "unused", "unmeasured"):
        memory.labels("ml", state).set(1 << 30)
    server, thread = start_http_server(0, "127.0.0.1", telemetry.registry)
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answered(real: Prometheus, query: str) -> list[Any]:
    found: list[Any] = real.ask("query", query=query)["result"]
    return found


def test_every_query_of_the_dashboard_returns_data(world: TroubledFleet, real: Prometheus) -> None:
    """The extender gets calls during the test, because rates need changes."""
    silent = dict(QUERIES)

    def all_told() -> bool:
        world.extender.post("/filter", offer(pod("too-large", "50Gi"), "shared", "broken"))
        for name, query in list(silent.items()):
            values = [each["value"][1] for each in answered(real, query)]
            if any(value != "NaN" for value in values):
                del silent[name]
        return not silent

    try:
        until(all_told, "every query returns data")
    except AssertionError:
        raise AssertionError(f"return nothing: {silent}") from None


def test_every_rule_is_evaluated_and_the_faults_raise_alerts(real: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        groups = real.ask("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    until(lambda: {rule["health"] for rule in rules()} == {"ok"}, "all rules were evaluated")

    def active() -> set[str]:
        return {rule["name"] for rule in rules() if rule["state"] != "inactive"}

    # Wait, because on a busy machine a scrape can be late, and its data is missing until the next
    # scrape.
    until(lambda: active() - MAY_BE_ACTIVE == ACTIVE, "what is wrong is seen, and nothing else")
    assert {rule["name"] for rule in rules()} == alerts().keys()


def test_every_series_that_a_rule_uses_exists(real: Prometheus) -> None:
    names = {
        name
        for rule in alerts().values()
        for name in re.findall(r"headroom_\w+", str(rule["expr"]))
    }

    def absent() -> set[str]:
        return {name for name in names if not answered(real, name)}

    # These metrics are missing because no port uses TLS, all GPU resources are managed, and no
    # container has crashed on an overcommitted GPU.
    expected = {
        "headroom_certificate_end_timestamp_seconds",
        "headroom_unmanaged_gpu_nodes",
        "headroom_crashed_on_overcommitted_bytes",
    }
    until(lambda: absent() <= expected, "Prometheus has scraped every series")
    assert absent() == expected


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    assert len(set(ids)) == len(ids)


def test_panels_have_descriptions_and_metrics_have_the_words_of_the_page() -> None:
    unexplained = {panel["title"] for panel in panels() if not panel.get("description")}
    # These panels need no description, because their titles are clear.
    assert unexplained == {
        *("Nodes that take pods", "Pending pods by reason"),
        "Age of the oldest pending pod by reason",
    }
    script = (PAGE / "app.js").read_text()
    for title in ("Allocatable", "Reserved by pods", "Measured in use", "Headroom"):
        assert f'"{title.lower()}"]' in script
        assert title in {panel["title"] for panel in panels()}


def test_queries_in_the_docs_are_served(world: TroubledFleet) -> None:
    """Query the debug API paths in docs/operate/alerts.md, with real values for the placeholders in
    capitals.
    """
    served = world.extender.get("/openapi.json").json()["paths"]
    asked = re.findall(r"`ask \"?(/[\w/]*)", DOCS.read_text())
    assert asked
    patterns = [re.sub(r"\{\w+\}", "[A-Z]+", path) for path in served]
    for path in set(asked):
        assert any(re.fullmatch(pattern, path) for pattern in patterns), path


def test_every_query_of_the_dashboard_selects_the_chosen_clusters() -> None:
    for panel in panels():
        for target in panel["targets"]:
            selectors = re.findall(r"headroom_\w+(\{[^}]*\})?", target["expr"])
            assert selectors, panel["title"]
            for selector in selectors:
                assert 'cluster=~"$cluster"' in selector, target["expr"]


def variables() -> dict[str, dict[str, Any]]:
    listed = json.loads(DASHBOARD.read_text())["templating"]["list"]
    return {each["name"]: each for each in listed}


def test_all_values_of_each_variable_are_selected_at_first() -> None:
    found = variables()
    assert list(found) == ["datasource", *VARIABLES]
    for name in VARIABLES:
        one = found[name]
        assert (one["allValue"], one["current"]["value"], one["multi"]) == (".*", "$__all", True)


def test_the_values_of_variables_exist(world: TroubledFleet, real: Prometheus) -> None:
    """Run the queries of the variables as Grafana does."""

    def values(name: str) -> set[str]:
        query = chosen(variables()[name]["query"]["query"])
        if inner := re.fullmatch(r"label_values\((.*), (\w+)\)", query):
            return {each["metric"].get(inner[2], "") for each in answered(real, inner[1])}
        inner = re.fullmatch(r"query_result\((.*)\)", query)
        assert inner
        (pattern,) = re.findall("^/(.*)/$", variables()[name]["regex"])
        texts = [
            ", ".join(f'{key}="{value}"' for key, value in each["metric"].items())
            for each in answered(real, inner[1])
        ]
        return {found[1] for text in texts if (found := re.search(pattern, "{" + text + "}"))}

    expected = {
        "cluster": {""},  # Prometheus has no label for its only cluster.
        "model": {"NVIDIA H100 80GB HBM3"},
        "node": {"shared"},
        "namespace": {"ml"},  # and, minutes later, the namespace of the extender's pods
    }
    until(
        lambda: all(expected[name] <= values(name) for name in expected),
        "all values are there",
        logs=lambda: str({name: values(name) for name in expected}),
    )


def test_links_of_the_page_and_the_docs_fit_the_dashboard() -> None:
    """Templates of the setting grafana_url in docs, settings and the dashboard's own links."""
    dashboard = json.loads(DASHBOARD.read_text())
    root = DASHBOARD.parents[3]
    files = [root / "headroom/runtime/settings/loading.py", *sorted((root / "docs").rglob("*.md"))]
    found = [
        link
        for file in files
        for link in re.findall(r"https://grafana\.example(/d/[^\s`\"]+)", file.read_text())
    ]
    assert len(found) >= 3
    found += re.findall(r'"url": "(/d/[^"]+)"', DASHBOARD.read_text())
    for link in found:
        path, _, query = link.partition("?")
        assert path == f"/d/{dashboard['uid']}", link
        names = re.findall(r"var-(\w+)=", query) + re.findall(r"\$\{(\w+):queryparam\}", query)
        assert names, link
        assert set(names) <= variables().keys(), link
