"""Checks that updates of the page keep what the reader has opened, selected or scrolled to."""

import re
from typing import Any

from playwright.sync_api import Browser, Page, Route, expect

from headroom.contract.gpunode import PodUse, Replicas
from tests.page.conftest import GIB, Looked, place, report
from tests.serving import Server

SELECTED = "document.getSelection().toString()"


def uses(server: Server, node: str, used_gib: int) -> None:
    report(server, node, {"used_bytes": used_gib * GIB, "unattributed_bytes": used_gib * GIB}, {})


def select(page: Page, text: str) -> None:
    """Select the text of the first element with exactly this text."""
    page.get_by_text(text, exact=True).first.evaluate(
        "element => document.getSelection().selectAllChildren(element)"
    )
    assert page.evaluate(SELECTED) == text


def test_a_report_updates_the_open_gpu_and_keeps_scroll_and_selection(
    readings: Looked, server: Server
) -> None:
    uses(server, "l4-0010", 3)
    readings.page.set_viewport_size({"width": 1280, "height": 400})
    page = readings.open("/fleet/l4-0010/0")
    detail = page.get_by_role("complementary", name="l4-0010 GPU 0, L4")
    expect(detail).to_contain_text("3.0 GiB in use")
    expect(page.locator("#live")).to_contain_text("live")
    select(page, "not shared" if detail.get_by_text("not shared").count() else "SM activity -")
    kept = page.evaluate(SELECTED)
    detail.evaluate("element => { element.scrollTop = 150; }")
    scrolled = detail.evaluate("element => element.scrollTop")
    assert scrolled > 0
    uses(server, "l4-0010", 5)
    expect(detail).to_contain_text("5.0 GiB in use")
    assert page.evaluate(SELECTED) == kept
    assert detail.evaluate("element => element.scrollTop") == scrolled


def test_a_report_updates_only_the_rows_of_its_node(readings: Looked, server: Server) -> None:
    page = readings.open("/nodes")
    page.get_by_label("Search").fill("l4-001")
    expect(page.locator("#found")).to_have_text("1 to 10 of 10 nodes")
    page.locator("summary").filter(has_text="l4-0011").click()
    page.locator("summary").filter(has_text="l4-0012").click()
    inside = page.get_by_role("table", name="Devices of l4-0011")
    expect(page.locator("#live")).to_contain_text("live")
    select(page, "GPU-l4-0011-1")
    page.evaluate("scrollTo(0, 200)")
    uses(server, "l4-0012", 6)
    changed = page.get_by_role("table", name="Devices of l4-0012")
    expect(changed).to_contain_text("6.0 GiB")
    expect(inside).to_be_visible()
    assert page.evaluate(SELECTED) == "GPU-l4-0011-1"
    assert page.evaluate("scrollY") == 200


def test_totals_follow_a_report_that_arrives_right_after_they_were_read(
    readings: Looked, server: Server
) -> None:
    page = readings.open("/overview")
    expect(page.locator("#live")).to_contain_text("live")
    # Disable the timer with which the page refreshes after 5 s without an event.
    page.evaluate("() => { window.started = setTimeout; }")
    page.evaluate("() => { setTimeout = (call, ms) => ms >= 5000 ? 0 : started(call, ms); }")
    try:
        with page.expect_response("**/v1/fleet"):
            pass
        with page.expect_response("**/v1/fleet"):
            uses(server, "l4-0014", 7)
    finally:
        page.evaluate("() => { setTimeout = started; }")


def test_a_lost_stream_is_shown_and_the_page_refreshes_without_it(
    readings: Looked, server: Server
) -> None:
    """The stream ends immediately, and the browser reconnects only after a minute."""
    body = "retry: 60000\n\n"
    readings.page.route(
        "**/v1/events", lambda route: route.fulfill(content_type="text/event-stream", body=body)
    )
    page = readings.open("/fleet/l4-0013/0")
    expect(page.locator("#live")).to_contain_text("connection lost: read again every 5 s")
    expect(page.locator("#live")).to_have_class("bad")
    uses(server, "l4-0013", 4)
    detail = page.get_by_role("complementary", name="l4-0013 GPU 0, L4")
    expect(detail).to_contain_text("4.0 GiB in use")


def test_a_hanging_console_is_shown_and_the_page_continues_when_it_answers(
    readings: Looked,
) -> None:
    page = readings.open("/overview")
    live = page.locator("#live")
    expect(live).to_contain_text("live")
    held: list[Route] = []
    hangs = True
    page.route("**/v1/overview?*", lambda route: held.append(route) if hangs else route.continue_())
    # The event stream stays open, as on a connection that is lost without an error.
    since = re.compile(r"Not up to date since [\d:]+ \S+: the console does not answer")
    expect(live).to_have_text(since)
    expect(live).to_have_class("bad")
    hangs = False
    for route in held:
        route.continue_()
    expect(live).to_have_text(re.compile(r"As of [\d:]+ \S+, live"))


def test_a_console_without_the_api_server_shows_since_when(readings: Looked) -> None:
    page = readings.open("/overview")
    live = page.locator("#live")
    expect(live).to_contain_text("live")
    gone = {"kind": "api_server", "place": None, "replica": None, "age_s": 120.0, "message": "gone"}
    page.route("**/v1/inputs", lambda route: route.fulfill(json={"inputs": [gone]}))
    expect(live).to_have_text(re.compile(r"Not up to date since [\d:]+ \S+: gone"))
    expect(live).to_have_class("bad")
    page.unroute("**/v1/inputs")
    expect(live).to_have_text(re.compile(r"As of [\d:]+ \S+, live"))


def test_losing_the_console_keeps_what_the_reader_has_opened(readings: Looked) -> None:
    readings.expected = "Failed to load resource"
    for where, content, read in (
        ("/pod/team-a/large", "no node can take the pod", r"/v1/explain\?"),
        ("/fleet/l4-0015/0", "24.0 GiB free for reservation", "/v1/map"),
    ):
        page = readings.open(where)
        shown = page.locator("main").get_by_text(content).first
        expect(shown).to_be_visible()
        page.route("**/v1/**", lambda route: route.abort())
        with page.expect_request(re.compile(read)):
            pass
        expect(page.locator("#live")).to_contain_text("the console does not answer")
        expect(shown).to_be_visible()
        page.unroute("**/v1/**")


def test_two_clicks_lead_from_the_overview_to_the_full_gpu_and_the_pod_at_fault(
    readings: Looked, server: Server
) -> None:
    """An SRE wants to know which GPU is out of memory and which pod is the cause."""
    place(server, "victim", "7Gi", "l4-0020")
    place(server, "leaks", "7Gi", "l4-0020")
    pods = [
        PodUse(uid=f"uid-{name}", device="GPU-l4-0020-0", used_bytes=used * GIB)
        for name, used in (("victim", 5), ("leaks", 18))
    ]
    full = {"used_bytes": 23 * GIB, "replicas": Replicas(free=2, allocated=2)}
    report(server, "l4-0020", full, {}, pods=pods)
    page = readings.open("/overview")
    risk = page.get_by_role("region", name="At risk").get_by_role("listitem").first
    expect(risk).to_contain_text("overcommitted")
    expect(risk).to_contain_text("25.0 GiB are reserved or used of 24.0 GiB: 1.0 GiB too much")
    risk.get_by_role("link", name="l4-0020 GPU 0").click()
    detail = page.get_by_role("complementary", name="l4-0020 GPU 0, L4")
    message = "overcommitted: 25.0 GiB are reserved or used of 24.0 GiB: 1.0 GiB too much"
    expect(detail).to_contain_text(message)
    at_fault = detail.get_by_role("listitem").filter(has_text="more than reserved")
    expect(at_fault).to_have_count(1)
    expect(at_fault).to_contain_text("team-a/leaks")
    expect(at_fault).to_contain_text("11.0 GiB more than reserved")
    at_fault.get_by_role("link", name="team-a/leaks").click()
    expect(page.get_by_role("heading", name="Pod team-a/leaks")).to_be_visible()
    expect(page.locator("#answer")).to_contain_text("uses 18.0 GiB, but has reserved 7.0 GiB")
    gpu = page.locator("#answer").get_by_role("link", name="l4-0020 GPU 0")
    expect(gpu).to_have_attribute("href", "#/fleet/l4-0020/0")
    expect(page.locator(".verdict")).to_have_class("verdict bad")


def test_nodes_gpus_and_pods_link_to_the_configured_dashboard(readings: Looked) -> None:
    template = "https://grafana.example/d/x?var-node={node}&var-gpu={uuid}&from={from_ms}"

    def with_template(route: Route) -> None:
        response = route.fetch()
        body: dict[str, Any] = response.json()
        assert body["settings"]["grafana_url"] is None
        body["settings"]["grafana_url"] = template
        route.fulfill(response=response, json=body)

    page = readings.open("/fleet/l4-0030/1")
    detail = page.get_by_role("complementary", name="l4-0030 GPU 1, L4")
    expect(detail).to_contain_text("No pod holds memory of this GPU.")
    expect(page.get_by_role("link", name="Grafana")).to_have_count(0)
    page.route("**/v1/status", with_template)
    page.reload()
    link = detail.get_by_role("link", name="Grafana")
    begin = r"https://grafana\.example/d/x\?var-node=l4-0030"
    expect(link).to_have_attribute("href", re.compile(rf"{begin}&var-gpu=GPU-l4-0030-1&from=\d+"))
    readings.open("/nodes?find=l4-0030")
    page.locator("summary").click()
    expect(page.get_by_role("link", name="Grafana")).to_have_attribute(
        "href", re.compile(rf"^{begin}&from=\d+$")
    )
    readings.open("/pod/team-a/runs")
    expect(page.get_by_role("link", name="Grafana")).to_have_attribute(
        "href", re.compile(r"^https://grafana\.example/d/x\?from=\d+$")
    )


def test_times_are_in_the_zone_of_the_reader(browser: Browser, server: Server) -> None:
    context = browser.new_context(timezone_id="Asia/Tokyo")
    try:
        page = context.new_page()
        page.goto(f"{server.debug}/#/overview")
        expect(page.locator("#live")).to_contain_text(re.compile(r"\d\d:\d\d:\d\d (GMT\+9|JST)"))
    finally:
        context.close()
