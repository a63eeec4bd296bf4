"""Tests the time ranges of the plots in Chromium: the last hour, and longer ranges from
Prometheus.
"""

import itertools
import re
from datetime import UTC, datetime
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from headroom.contract.gpunode import PodUse, Replicas, SmActivity
from tests.page.conftest import GIB, Looked, place, report
from tests.serving import Server
from tests.waiting import until


def with_prometheus(page: Page) -> None:
    """Configure a Prometheus that does not exist."""

    def settings(route: Route) -> None:
        body = route.fetch().json()
        assert body["settings"]["long_history"] is False
        body["settings"]["long_history"] = True
        route.fulfill(json=body)

    page.route("**/v1/status", settings)


def recorded(route: Route, days: float, *series: dict[str, Any]) -> None:
    """Answer the request with history from Prometheus. Each series has three values over this
    number of days.
    """
    now_s = datetime.now(UTC).timestamp()
    body = route.fetch(url=route.request.url.partition("?")[0]).json()
    body |= {"source": "prometheus", "series": series, "resolution_s": 1680.0}
    route.fulfill(json=body | {"at_s": [now_s - days * 86_400, now_s - 86_400, now_s]})


def run(server: Server, name: str, node: str, used_gib: int) -> None:
    """Bind a pod that requests 7Gi, and report its use."""
    place(server, name, "7Gi", node)
    use = PodUse(
        uid=f"uid-{name}",
        namespace="team-a",
        name=name,
        device=f"GPU-{node}-0",
        used_bytes=used_gib * GIB,
    )
    device = {"used_bytes": used_gib * GIB, "replicas": Replicas(free=3, allocated=1)}
    report(server, node, device | {"sm_activity": SmActivity(0.25, "dcgm", 0.25)}, {}, pods=[use])


@pytest.fixture(scope="module", autouse=True)
def _history(server: Server) -> None:
    """Start recording before the first test, because the console records a value every 10 s."""
    report(server, "l4-0030", {"used_bytes": 6 * GIB, "unattributed_bytes": 6 * GIB}, {})
    run(server, "ranged", "l4-0031", 5)
    run(server, "slowed", "l4-0033", 3)
    until(lambda: server.get("/v1/history?pod=team-a/slowed").json()["at_s"], "the first values")


def in_words(page: Page, plot: str) -> Locator:
    """Return the sentence below a plot. It describes the plot's first line."""
    return page.get_by_role("group", name=plot).locator("p")


def test_the_plots_of_a_gpu_offer_longer_ranges_only_with_prometheus(readings: Looked) -> None:
    page = readings.open("/fleet/l4-0030/0")
    detail = page.get_by_role("complementary", name="l4-0030 GPU 0, L4")
    memory, chosen = detail.get_by_role("group", name="Memory"), detail.get_by_label("Plots of")
    expect(memory).to_contain_text("in use: 6.0 GiB now")
    expect(chosen).to_be_hidden()

    asked: list[str] = []

    def history(route: Route) -> None:
        asked.append(route.request.url.partition("since=")[2])
        if not asked[-1]:
            route.continue_()
            return
        # Prometheus has no reservations and no SM activity of this GPU.
        used = {"kind": "used", "unit": "bytes", "values": [9 * GIB, 2 * GIB, 3 * GIB]}
        recorded(route, 6, used)

    with_prometheus(page)
    page.route("**/v1/history/nodes/**", history)
    page.reload()
    expect(chosen).to_be_visible()
    chosen.select_option("the last 7 days")
    expect(memory).to_contain_text(
        re.compile(r"in use: 3\.0 GiB now, at most 9\.0 GiB at \d+ \w+,? \d\d:\d\d")
    )
    expect(detail).to_contain_text("Source: prometheus.")
    expect(detail.get_by_role("group", name="SM activity")).to_contain_text(
        "not measured in this range"
    )
    chosen.select_option("the last hour")
    expect(memory).to_contain_text("in use: 6.0 GiB now")
    assert asked.count("7d") == 1


def test_an_unreadable_range_is_shown_as_a_sentence(readings: Looked) -> None:
    readings.expected = "503"
    with_prometheus(readings.page)
    page = readings.open("/overview")
    with page.expect_response(re.compile(r"/v1/history/fleet\?since=6h")):
        page.get_by_label("Plots of").select_option("the last 6 hours")
    expect(
        page.get_by_text("the console records only the last hour; for a longer range set")
    ).to_be_visible()
    expect(page.get_by_role("region", name="Waiting")).to_contain_text("team-a/large")
    page.get_by_label("Plots of").select_option("the last hour")
    expect(page.get_by_text("Source: console.")).to_be_visible()


def test_the_plots_of_a_pod_show_the_last_hour_and_with_prometheus_longer_ranges(
    readings: Looked,
) -> None:
    page = readings.open("/pod/team-a/ranged")
    memory, chosen = in_words(page, "Memory of the pod"), page.get_by_label("Plots of")
    hour = "in use on GPU-l4-0031-0: 5.0 GiB now, at most 5.0 GiB at "
    expect(memory).to_have_text(re.compile(rf"{hour}\d\d:\d\d"))
    expect(chosen).to_be_hidden()
    asked: list[str] = []

    def history(route: Route) -> None:
        asked.append(route.request.url.partition("since=")[2])
        if not asked[-1]:
            route.continue_()
        elif asked[-1] == "24h":
            recorded(route, 1)
        else:
            use = {"kind": "pod", "unit": "bytes", "device": "GPU-l4-0031-0"}
            values = [9 * GIB, 2 * GIB, 3 * GIB]
            recorded(route, 6, {**use, "requested_bytes": None, "values": values})

    with_prometheus(page)
    page.route(re.compile(r"/v1/history\?pod="), history)
    page.reload()
    expect(chosen).to_be_visible()
    expect(chosen.get_by_role("option")).to_have_text(
        ["the last hour", "the last 6 hours", "the last day", "the last 7 days"]
    )
    expect(memory).to_have_text(re.compile(hour))
    expect(in_words(page, "SM activity of its GPUs")).to_contain_text("25 % now")
    chosen.select_option("the last 7 days")
    expect(memory).to_have_text(
        re.compile(
            r"in use on GPU-l4-0031-0: 3\.0 GiB now, at most 9\.0 GiB at \d+ \w+,? \d\d:\d\d"
        )
    )
    expect(page.get_by_role("group", name="SM activity of its GPUs")).to_be_hidden()
    expect(
        page.get_by_text("Source: prometheus. SM activity is shown for the last hour only.")
    ).to_be_visible()
    # The choice stays while the page refreshes the pod.
    with page.expect_response(re.compile(r"/v1/explain\?pod=")):
        pass
    expect(memory).to_contain_text("at most 9.0 GiB")
    assert asked.count("7d") == 1
    chosen.select_option("the last day")
    expect(page.get_by_text("Prometheus has no use of this pod in this range.")).to_be_visible()
    expect(memory).to_be_hidden()
    chosen.select_option("the last hour")
    expect(memory).to_have_text(re.compile(hour))
    expect(page.get_by_text("Source: console.")).to_be_visible()
    assert asked.count("24h") == 1


def test_a_recovered_prometheus_is_shown_within_seconds(readings: Looked) -> None:
    fails = True
    reason = "Prometheus cannot be read: Connection refused"

    def history(route: Route) -> None:
        if "since=" not in route.request.url:
            route.continue_()
        elif fails:
            route.fulfill(status=503, json={"detail": reason})
        else:
            used = {"kind": "used", "unit": "bytes", "values": [4 * GIB, 3 * GIB, 2 * GIB]}
            recorded(route, 6, used)

    readings.expected = "503"
    with_prometheus(readings.page)
    readings.page.route(re.compile("/v1/history"), history)
    page = readings.open("/overview")
    page.get_by_label("Plots of").select_option("the last 7 days")
    expect(page.get_by_text(reason)).to_be_visible()
    fails = False
    expect(page.get_by_text("Source: prometheus.")).to_be_visible()
    expect(page.get_by_text(reason)).to_be_hidden()


def test_unreadable_costs_are_retried_within_seconds(readings: Looked) -> None:
    fails = True

    def costs(route: Route) -> None:
        if fails:
            route.continue_()
        else:
            body = route.fetch(url=route.request.url.replace("since=7d", "since=1h")).json()
            route.fulfill(json=body)

    readings.expected = "503"
    readings.page.route("**/v1/costs?since=7d", costs)
    page = readings.open("/idle")
    page.get_by_label("In", exact=True).select_option("the last 7 days")
    failure = page.get_by_text("Not available: the console records only the last hour")
    expect(failure).to_be_visible()
    fails = False
    expect(failure).to_be_hidden()


def test_a_slow_prometheus_does_not_delay_the_rest_of_a_view(
    readings: Looked, server: Server
) -> None:
    waiting: list[Route] = []
    used = itertools.count(1)

    def wait_for(read: re.Pattern[str]) -> None:
        """Send a report, and wait until the page refreshes its view."""
        with readings.page.expect_response(read):
            report(server, "l4-0034", {"used_bytes": next(used) * GIB}, {})

    def history(route: Route) -> None:
        if "since=" in route.request.url:
            waiting.append(route)
        else:
            route.continue_()

    readings.expected = "503"
    with_prometheus(readings.page)
    readings.page.route(re.compile("/v1/history"), history)
    for where, read in (
        ("/fleet/l4-0033/0", re.compile(r"/v1/nodes/l4-0033$")),
        ("/pod/team-a/slowed", re.compile(r"/v1/explain\?pod=")),
        ("/overview", re.compile(r"/v1/overview")),
    ):
        waiting.clear()
        page = readings.open(where)
        page.get_by_label("Plots of").select_option("the last 6 hours")
        expect(page.get_by_text("Reading Prometheus …")).to_be_visible()
        for _ in range(2):  # The first request may have begun before the choice.
            wait_for(read)
        (slow,) = waiting
        # A response that arrives after another choice is not shown.
        page.get_by_label("Plots of").select_option("the last hour")
        expect(page.get_by_text("Source: console.")).to_be_visible()
        slow.fulfill(status=503, json={"detail": "too old"})
        wait_for(read)
        expect(page.get_by_text("too old")).to_be_hidden()
