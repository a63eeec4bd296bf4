"""The page in Chromium: finding faults, explaining pods, following changes."""

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from extender.observability.feed import KINDS
from headroom.kubectl import tables
from headroom.kubectl.why import why
from tests.controlplane import ROOT
from tests.page.conftest import Looked, ask, place
from tests.processes import free_ports
from tests.serving import Server, serving
from tests.waiting import until


def test_the_fleet_is_shown_in_totals_and_pages(readings: Looked) -> None:
    page = readings.open("/nodes")
    facts = page.locator("#facts")
    expect(facts).to_contain_text("61nodes")
    expect(page.locator("#observes")).to_be_hidden()
    expect(facts).to_contain_text("128devices")
    expect(facts).to_contain_text("1unhealthy devices")
    expect(page.locator("#found")).to_have_text("1 to 50 of 61 nodes")
    page.get_by_role("button", name="Next").click()
    expect(page.locator("#found")).to_have_text("51 to 61 of 61 nodes")
    expect(page.get_by_role("button", name="Next")).to_be_disabled()
    page.get_by_role("button", name="Previous").click()
    expect(page.locator("#found")).to_have_text("1 to 50 of 61 nodes")


def test_the_overview_leads_to_the_gpu_and_to_the_pod(readings: Looked) -> None:
    page = readings.open("/overview")
    risk = page.get_by_role("region", name="At risk")
    expect(risk).to_contain_text("All is well: no GPU is overcommitted")
    expect(page.get_by_role("group", name="Memory of the fleet in the last hour")).to_be_visible()
    waiting = page.get_by_role("region", name="Waiting").get_by_role("listitem")
    expect(waiting).to_contain_text("no node can take the pod")
    expect(waiting).to_contain_text("each requests 1 x nvidia.com/gpu with 90Gi")
    expect(waiting.get_by_role("link")).to_have_attribute("href", "#/pod/team-a/large")
    assert page.evaluate(CONTRASTS) == []
    page.get_by_role("region", name="Broken").get_by_role("link", name="l4-0059 GPU 1").click()
    detail = page.get_by_role("complementary", name="l4-0059 GPU 1")
    expect(detail).to_contain_text("unhealthy")
    expect(detail).to_contain_text("XID 79")
    expect(detail).to_contain_text(re.compile(r"report \d+s old"))
    marked = detail.get_by_role("listitem").filter(has_text="GPU unhealthy")
    expect(marked).to_have_text(re.compile(r"^X \d\d:\d\d GPU unhealthy XID 79$"))


def test_lists_of_the_overview_without_entries_say_that_all_is_well(readings: Looked) -> None:
    def empty(route: Route) -> None:
        body = route.fetch().json()
        assert (len(body["waiting"]), len(body["broken"])) == (1, 1)
        body |= {"totals": dict.fromkeys(body["totals"], 0), "waiting": [], "broken": []}
        route.fulfill(json=body)

    readings.page.route("**/v1/overview?*", empty)
    page = readings.open("/overview")
    for name, well in (
        ("At risk", "All is well: no GPU is overcommitted, and none will be full within an hour."),
        ("Waiting", "All is well: no pod waits for a GPU."),
        ("Broken", "All is well: all nodes report, and all GPUs are healthy."),
    ):
        expect(page.get_by_role("region", name=name)).to_contain_text(well)


def test_a_gpu_shows_modes_taints_cordons_and_the_memory_of_no_pod(readings: Looked) -> None:
    def changed(route: Route) -> None:
        body = route.fetch().json()
        if "device" in body:
            body["device"] |= {"kind": "mig", "cordoned": True, "reserved_bytes": 1 << 30}
            body["device"] |= {"unattributed_bytes": 3 << 30}
        else:
            more = {"cordoned": True, "certainty": "steered", "taints": ["gpu=only:NoSchedule"]}
            body["node"] |= more
        route.fulfill(json=body)

    readings.page.route("**/v1/nodes/l4-0031*", changed)
    readings.page.route("**/v1/nodes/l4-0031/devices/*", changed)
    page = readings.open("/fleet/l4-0031/0")
    detail = page.get_by_role("complementary", name="l4-0031 GPU 0, L4")
    state = detail.locator(".badges").get_by_role("listitem")
    expect(state).to_have_text(
        [
            *("node cordoned", "GPU cordoned: takes no new pods", "taint gpu=only:NoSchedule"),
            *("24.0 GiB free for reservation", "0.0 GiB in use", "SM -", "MIG device"),
            *("time-slicing, 4 of 4 replicas free", "GPU of the next pod: steered by Headroom"),
            re.compile(r"report \d+\w old"),
        ]
    )
    bar = detail.get_by_role("list", name="Memory of the GPU, 24.0 GiB").get_by_role("listitem")
    names = ["3.0 GiB unattributed", "1.0 GiB driver reserve, 0.0 GiB reserve of the node"]
    expect(bar).to_have_count(2)
    for part, name in zip(bar.all(), names, strict=True):
        expect(part).to_have_accessible_name(name)


def test_teams_are_sorted_and_found_by_what_the_url_says(readings: Looked) -> None:
    page = readings.open("/teams?sort=waiting_pods")
    status = page.get_by_role("status").filter(has_text="team-a")
    expect(status).to_have_text("team-a comes first by waiting pods: 1 pod.")
    owners = page.get_by_role("table", name="By owner").get_by_role("row")
    expect(owners.nth(1)).to_contain_text("team-a/large")
    waiting = owners.nth(1).get_by_role("cell").last
    expect(waiting).to_have_text("1 pod, 90.0 GiB")
    page.get_by_label("Find").fill("other")
    expect(owners).to_have_count(0)
    assert page.url.endswith("#/teams?sort=waiting_pods&find=other")


def test_the_quotas_of_a_namespace_are_under_its_teams(readings: Looked) -> None:
    """The embedded server has no quotas, so the test answers for it."""
    row = {
        **{"namespace": "team-a", "name": "gpu-memory", "resource": "requests.headroom.gpu/vram"},
        **{"hard_bytes": 12 << 30, "used_bytes": 12 << 30, "reserved_bytes": 7 << 30},
    }
    asked: list[str] = []

    def answered(route: Route) -> None:
        asked.append(route.request.url.partition("/v1/")[2])
        route.fulfill(json=route.fetch().json() | {"quotas": [row]})

    readings.page.route("**/v1/quotas*", answered)
    page = readings.open("/teams/team-a")
    found = page.get_by_role("table", name="Quotas").get_by_role("row").nth(1)
    expect(found.get_by_role("cell")).to_have_text(
        ["team-a", "gpu-memory", "12.0 GiB", "12.0 GiB", "0.0 GiB", "7.0 GiB"]
    )
    assert page.evaluate(CONTRASTS) == []
    assert asked == ["quotas?namespace=team-a"]
    # The page refreshes every few seconds, and reads the quotas once a minute.
    refresh = """async () => {
        const {quotas} = await import("./page/quotas.js"), found = quotas("");
        await found.refresh(); await found.refresh();
        return found.element.querySelectorAll("tbody tr").length;
    }"""
    assert (page.evaluate(refresh), asked[1:]) == (1, ["quotas"])


def test_quotas_that_cannot_be_read_are_a_sentence(readings: Looked) -> None:
    detail = "the ResourceQuotas cannot be read: see the log of the console"
    readings.expected = "503"
    readings.page.route(
        "**/v1/quotas*", lambda route: route.fulfill(status=503, json={"detail": detail})
    )
    page = readings.open("/teams")
    expect(page.get_by_text(f"Quotas: {detail}.")).to_be_visible()
    expect(page.get_by_role("table", name="By namespace")).to_be_visible()


def test_pods_are_found_by_what_the_url_says(readings: Looked) -> None:
    page = readings.open("/pods?state=waiting")
    status = page.get_by_role("status").filter(has_text="found")
    expect(status).to_have_text(
        "1 pod found, 1 waiting for 90.0 GiB: 0.0 GiB reserved, 0.0 GiB in use, 0.0 GiB unused."
    )
    rows = page.get_by_role("table", name="All pods").get_by_role("row")
    expect(rows.nth(1)).to_contain_text("1 x nvidia.com/gpu with 90Gi")
    expect(page.get_by_role("link", name="team-a/large")).to_be_visible()
    page.get_by_label("State").select_option("bound")
    expect(rows.nth(1).get_by_role("cell")).to_have_text(
        [
            *("team-a/runsPod runs", re.compile("unconfirmed|running"), "7.0 GiB", "-", "-", "-"),
            *(re.compile(r"\d+d"), "l4-0000L4"),
        ]
    )
    assert page.url.endswith("#/pods?state=bound")
    page.get_by_label("Search").fill("no such")
    expect(page.get_by_text("No pod matches.")).to_be_visible()
    assert page.url.endswith("#/pods?state=bound&search=no+such")
    page.get_by_role("button", name="Clear").click()
    expect(rows).to_have_count(3)
    assert page.url.endswith("#/pods")


def test_a_user_learns_in_two_clicks_why_a_pod_is_pending_and_what_helps(
    readings: Looked, server: Server
) -> None:
    page = readings.open("/overview")
    page.get_by_role("link", name="Pods", exact=True).click()
    page.get_by_role("link", name="team-a/large").click()
    verdict = page.locator(".verdict")
    expect(verdict).to_have_text(
        "no node can take the pod: it needs 90.0 GiB, larger than any GPU that it may use "
        "(80.0 GiB)"
    )
    # The page, the API and `kubectl headroom why` show the same sentences.
    body = server.get("/v1/explain/pods/team-a/large").json()
    assert why(body)[0] == f"Pod team-a/large: {verdict.inner_text()}"
    lower = page.get_by_role("listitem").filter(has_text=body["suggestions"][0])
    assert f"  {body['suggestions'][0]}" in why(body)
    fix = lower.locator("code")
    expect(fix).to_have_text(body["advice"][0]["fix"])
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    lower.get_by_role("button", name="Copy").click()
    expect(lower.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == body["advice"][0]["fix"]
    life = page.get_by_role("list", name="Timeline").get_by_role("listitem")
    expect(life.first).to_contain_text("filtered kube-scheduler tried it: 3 nodes offered, none")
    expect(life.last).to_contain_text("created the pod was created")
    assert page.evaluate(CONTRASTS) == []


def test_a_lead_learns_in_three_clicks_which_team_wastes_most(readings: Looked) -> None:
    sums = {"pods": 1, "waiting_pods": 0, "reserved_bytes": 8 << 30, "used_bytes": 2 << 30}
    sums |= {"peak_bytes": 3 << 30, "overuse_bytes": 0, "unmeasured_pods": 0}
    ml = {"namespace": "team-a", **sums, "unused_bytes": 6 << 30}
    owner = {**ml, "kind": "Pod", "name": "runs"}

    def measured(route: Route) -> None:
        body = route.fetch().json()
        body |= {"teams": [ml, {**ml, "namespace": "web", "unused_bytes": 1 << 30}]}
        route.fulfill(json=body | {"owners": [owner], "matching": 1})

    readings.page.route("**/v1/teams*", measured)
    page = readings.open("/overview")
    page.get_by_role("link", name="Teams").click()
    expect(page.get_by_text("team-a wastes most:")).to_have_text(
        "team-a wastes most: 6.0 GiB are reserved and unused, 75 % of its reservations. "
        "Of all owners, Pod team-a/runs wastes most: 6.0 GiB."
    )
    page.get_by_role("table", name="By owner").get_by_role("link", name="team-a/runs").click()
    rows = page.get_by_role("table", name="All pods").get_by_role("row")
    expect(rows).to_have_count(2)
    rows.get_by_role("link", name="team-a/runs").click()
    expect(page.locator(".verdict")).to_have_text("bound to node l4-0000")


def test_500_pending_pods_take_at_most_six_screens_of_a_phone(readings: Looked) -> None:
    def many(route: Route) -> None:
        body = route.fetch().json()
        limit = int(re.search(r"limit=(\d+)", route.request.url)[1])  # type: ignore[index]
        body |= {"pods": body["pods"] * limit, "matching": 500, "remaining": 500 - limit}
        route.fulfill(json=body | {"continue": "team-a/large"})

    readings.page.set_viewport_size({"width": 390, "height": 844})
    readings.page.route("**/v1/pending?*", many)
    page = readings.open("/pending")
    expect(page.get_by_text("500 pods pending for a GPU")).to_be_visible()
    expect(page.get_by_role("link", name="team-a/large")).to_have_count(10)
    expect(page.get_by_role("button", name="Next")).to_be_enabled()
    assert page.evaluate("document.documentElement.scrollHeight") <= 6 * 844


def test_pools_are_summed_by_model(readings: Looked) -> None:
    page = readings.open("/pools")
    expect(page.get_by_text("1 pool, 128 GPUs.")).to_be_visible()
    l4 = page.get_by_role("table", name="Totals").get_by_role("row").filter(has_text="L4")
    assert l4.get_by_role("cell").all_inner_texts()[:5] == ["no pool label", "L4", "60", "120", "1"]
    expect(l4).to_contain_text("1 unhealthy")


def test_the_map_is_used_by_keyboard_and_keeps_its_choices_in_the_url(readings: Looked) -> None:
    readings.page.emulate_media(color_scheme="dark")
    page = readings.open("/fleet?group=model&colour=used")
    expect(page.locator("#found")).to_have_text("128 GPUs on 61 nodes")
    page.get_by_role("listbox").focus()
    tile = page.get_by_role("listbox", name="GPUs").get_by_role("option")
    expect(tile).to_have_text("h100 GPU 0, H100 80.0 GiB: 0 % reserved, 0 % in use, SM unknown")
    for _ in range(2):  # the second line of the node's tiles, then the first node of the next group
        page.keyboard.press("ArrowDown")
    expect(tile).to_contain_text("l4-0000 GPU 0, L4 24.0 GiB: 29 % reserved")
    page.keyboard.press("Enter")
    detail = page.get_by_role("complementary", name="l4-0000 GPU 0, L4")
    pods = detail.get_by_role("list", name="Memory of the GPU, 24.0 GiB").get_by_role("listitem")
    expect(pods.first).to_have_accessible_name("team-a/runs: 7.0 GiB reserved, use unknown")
    expect(detail.get_by_role("group", name="Memory")).to_contain_text("in use: 0.0 GiB now")
    expect(detail.locator("canvas")).to_have_count(2)
    assert page.url.endswith("#/fleet/l4-0000/0?group=model&colour=used")
    assert page.evaluate(CONTRASTS) == []
    page.keyboard.press("Escape")
    expect(detail).to_be_hidden()
    assert page.evaluate("document.activeElement.className") == "map"
    page.go_back()
    expect(detail).to_be_visible()


def test_tiles_are_drawn_in_the_colours_of_their_states(readings: Looked) -> None:
    page = readings.open("/fleet")
    drawn = page.evaluate(TILES)
    healthy, closed, unhealthy, cordoned, over = drawn["tiles"]
    plain, line, text, bad = drawn["plain"], drawn["quiet"], drawn["text"], drawn["bad"]
    assert healthy == {"corner": plain, "middle": plain, "edge": plain}
    assert closed == {"corner": plain, "middle": line, "edge": plain}
    assert unhealthy == {"corner": text, "middle": text, "edge": plain}
    # The line begins in the lower left corner, and the corner is the upper left one.
    assert cordoned == {"corner": plain, "middle": text, "edge": plain}
    assert over == {"corner": bad, "middle": plain, "edge": bad}
    assert drawn["dimmed"][3] == 0x26
    assert drawn["between"] == [0, 0, 0, 0]


#: Draws one node a state in a canvas with two pixels for each CSS pixel, and returns pixels.
TILES = """async () => {
  const {layOut, painter} = await import("./page/tiles.js");
  const number = ([r, g, b, a]) => new Uint32Array(new Uint8Array([r, g, b, a]).buffer)[0];
  const plain = [10, 20, 30, 255], text = [0, 0, 0, 255], quiet = [90, 90, 90, 255];
  const bad = [200, 0, 0, 255], device = more => ({state: 0, risk: 0, ...more});
  const node = (name, more, own) => ({name, devices: [device(more)], ...own});
  const nodes = [node("healthy"), node("closed", {}, {closed: true}), node("sick", {state: 1}),
    node("cordoned", {state: 2}), node("over", {risk: 4}), node("dimmed")];
  const layout = layOut([{name: "", title: "", nodes}], 400, 14), [block] = layout.blocks;
  const canvas = Object.assign(document.createElement("canvas"), {width: 800, height: 200});
  const theme = {text: "#000", quiet: "#000", link: "#000", paint: {
    text: number(text), quiet: number(quiet), bad: number(bad)}};
  painter(canvas)(layout, {top: 0, width: 400, height: 100, ratio: 2, theme, cursor: null,
    selected: null, colourOf: () => number(plain), dimmed: each => each.name === "dimmed"});
  const {data} = canvas.getContext("2d").getImageData(0, 0, 800, 200);
  const pixel = (i, x, y) => {
    const at = 4 * ((2 * block.y + y) * 800 + 2 * i * block.cellWidth + x);
    return [...data.slice(at, at + 4)];
  };
  return {plain, text, quiet, bad, dimmed: pixel(5, 9, 9), between: pixel(0, 30, 9),
    tiles: [0, 1, 2, 3, 4].map(i => (
      {corner: pixel(i, 0, 0), middle: pixel(i, 14, 14), edge: pixel(i, 14, 0)}))};
}"""


def test_a_bar_has_an_accessible_description(readings: Looked) -> None:
    page = readings.open("/nodes")
    page.get_by_label("Search").fill("l4-0059")
    expect(page.locator("#found")).to_have_text("1 to 1 of 1 node")
    outsider = page.get_by_role("img", name=re.compile("GPU 0 L4"))
    expect(outsider).to_have_accessible_name(
        "GPU 0 L4, 4.0 GiB free, 0.0 GiB reserved by pods, 19.9 GiB unattributed, "
        "20.0 GiB measured in use, of 24.0 GiB"
    )
    unhealthy = page.get_by_role("img", name=re.compile("GPU 1 L4"))
    expect(unhealthy).to_have_accessible_name(re.compile("unhealthy: .*XID 79"))

    def widths() -> list[tuple[str, float]]:
        found: list[tuple[str, float]] = outsider.locator(".bar i").evaluate_all(
            "parts => parts.map(each => [each.className, each.getBoundingClientRect().width])"
        )
        return found

    until(lambda: all(width > 0 for _, width in widths()), "bars that are laid out")
    # What a driver keeps for a process is forgiven every device, and is not unattributed.
    (unattributed, free) = widths()
    assert (unattributed[0], free[0]) == ("unattributed", "free")
    assert unattributed[1] / free[1] == pytest.approx(19.94 / 4.06, rel=0.05)


def test_an_unknown_use_is_not_shown_as_a_number(readings: Looked) -> None:
    """The driver does not report the use of some devices; the API has -1 for them."""

    def unmeasured(route: Route) -> None:
        answer = route.fetch()
        body = answer.json()
        for node in body["nodes"]:
            for each in node["devices"]:
                each["used_bytes"] = -1
        route.fulfill(response=answer, json=body)

    readings.page.route("**/v1/nodes?*", unmeasured)
    page = readings.open("/nodes")
    page.get_by_label("Search").fill("l4-0059")
    expect(page.locator("#found")).to_have_text("1 to 1 of 1 node")
    expect(page.get_by_role("img", name=re.compile("GPU 0 L4"))).to_have_accessible_name(
        re.compile("unknown measured in use")
    )


def test_a_pod_shows_a_proven_limit_and_whether_it_is_evicted(readings: Looked) -> None:
    page = readings.open("/nodes")
    page.get_by_label("Search").fill("team-a/runs")
    expect(page.locator("#found")).to_have_text("1 to 1 of 1 node")
    page.locator("summary").click()
    holders = page.get_by_role("listitem").filter(has_text="team-a/runs")
    expect(holders.first).to_be_visible()
    expect(holders.first).not_to_contain_text("capped")

    def proven(route: Route) -> None:
        answer = route.fetch()
        body = answer.json()
        for node in body["nodes"]:
            device = node["devices"][0]["uuid"]
            message = "capped at 7.0 GiB by the driver"
            node["caps"] = [{"uid": "uid-runs", "device": device, "message": message}]
            over = {"uid": "uid-runs", "device": device, "message": "evicted within seconds"}
            node["overuse"] = [over]
        route.fulfill(response=answer, json=body)

    page.route("**/v1/nodes?*", proven)
    page.reload()
    page.get_by_label("Search").fill("team-a/runs")
    expect(page.locator("#found")).to_have_text("1 to 1 of 1 node")
    page.locator("summary").click()
    expect(holders.first).to_contain_text("(may be here); capped at 7.0 GiB by the driver")
    expect(holders.first).to_contain_text("7.0 GiB; evicted within seconds")
    expect(holders.last).not_to_contain_text("capped")  # on the other device that it could get
    expect(holders.last).not_to_contain_text("evicted")


def test_nodes_with_faults_are_found_and_opened_by_keyboard(readings: Looked) -> None:
    page = readings.open("/nodes")
    page.get_by_label("only where something is wrong").check()
    expect(page.locator("#found")).to_have_text("1 to 1 of 1 node")
    page.get_by_label("Search").focus()
    for _ in range(2):  # the box to tick, the node
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    devices = page.get_by_role("table", name="Devices of l4-0059")
    expect(devices).to_contain_text("24.0 GiB - 20.0 GiB unattributed = 4.0 GiB")
    expect(devices).to_contain_text("unhealthy")
    page.keyboard.press("Enter")
    expect(devices).to_have_count(0)


def test_a_pod_on_a_device_links_to_its_explanation(readings: Looked) -> None:
    page = readings.open("/nodes")
    page.get_by_label("Search").fill("team-a/runs")
    expect(page.locator("#found")).to_have_text("1 to 1 of 1 node")
    page.locator("summary").click()
    page.get_by_role("link", name="team-a/runs").first.click()
    expect(page.get_by_role("heading", name="Pod team-a/runs")).to_be_visible()
    expect(page.locator("#answer")).to_contain_text("bound to node l4-0000")
    expect(page.get_by_role("table", name="Annotations")).to_contain_text("headroom.gpu/placement")


def test_a_pod_that_waits_leads_to_the_arithmetic_of_the_nearest_node(readings: Looked) -> None:
    page = readings.open("/pending")
    waits = page.get_by_role("table", name="Pending pods")
    expect(waits).to_contain_text("10.0 GiB short on h100")
    expect(page.locator("nav")).to_contain_text("Pending 1")
    page.get_by_role("link", name="team-a/large").click()
    answer = page.locator("#answer")
    expect(answer).to_contain_text("no node can take the pod")
    expect(answer).to_contain_text("container main requests 1 x nvidia.com/gpu with 90Gi")
    expect(answer).to_contain_text("3 nodes: insufficient GPU memory on any device")
    expect(answer).to_contain_text(re.compile(r"source: recomputed, generation \d+"))
    expect(page.locator("#details")).to_contain_text(
        re.compile(r"source: decision, generation \d+ of extender \w+")
    )
    sums = page.get_by_role("table", name="Candidate devices of h100")
    first = sums.get_by_role("row").nth(1).get_by_role("cell").all_inner_texts()
    assert first[:1] == ["0, 1, 2, 3, 4, 5, 6, 7 H100"]
    # Nothing reduces the memory of these devices, so no column is about that.
    memory, headroom, room, needs, short = map(gib, first[1:6])
    assert memory == headroom
    assert needs - room == short == 10


def test_the_last_decision_names_the_extender_and_the_verb_that_ranked(readings: Looked) -> None:
    """Another extender than that of filter may have ranked the nodes."""
    by_filter = False

    def ranked(route: Route) -> None:
        response = route.fetch()
        body = response.json()
        body["last_decision"]["filter"]["replica"] = "ext-filter"
        body["last_decision"]["prioritize"] = {
            **{"replica": "ext-ranks", "snapshot_generation": 4711, "at": body["generatedAt"]},
            **{"took_ms": 0.5, "times": 1, "offered": 2, "winner": "h100", "candidates": []},
            "by_filter": by_filter,
        }
        route.fulfill(response=response, json=body)

    readings.page.route("**/v1/explain/pods/**", ranked)
    answer = readings.open("/pod/team-a/large").locator("#details")
    expect(answer).to_contain_text("source: decision, generation 4711 of extender ext-ranks")
    expect(answer).to_contain_text("prioritize: h100 of 2 nodes (0.5 ms)")
    by_filter = True
    readings.page.reload()
    expect(answer).to_contain_text("filter returned only the best: h100 of 2 nodes")


def gib(text: str) -> float:
    return float(text.removesuffix(" GiB"))


def test_an_unknown_pod_is_reported(readings: Looked) -> None:
    readings.expected = "404"  # the browser itself writes it to its console
    page = readings.open("/pod")
    page.get_by_role("textbox", name="Pod").fill("team-a/unknown")
    page.get_by_role("button", name="Why?").click()
    expect(page.locator("#answer")).to_contain_text("pod team-a/unknown is not known")


def test_changes_appear_without_closing_opened_rows(readings: Looked, server: Server) -> None:
    page = readings.open("/nodes")
    page.get_by_label("Search").fill("l4-0007")
    expect(page.locator("#found")).to_have_text("1 to 1 of 1 node")
    page.locator("summary").click()
    devices = page.get_by_role("table", name="Devices of l4-0007")
    expect(devices).to_contain_text("no pod")
    expect(page.locator("#live")).to_contain_text("live")
    place(server, "newcomer", "7Gi", "l4-0007")
    expect(devices.get_by_role("link", name="team-a/newcomer").first).to_be_visible()
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"


def test_a_row_that_is_replaced_as_it_is_opened_is_open(readings: Looked, server: Server) -> None:
    page = readings.open("/nodes")
    page.get_by_label("Search").fill("l4-0008")
    expect(page.locator("#found")).to_have_text("1 to 1 of 1 node")
    expect(page.locator("#live")).to_contain_text("live")
    # The event that it was opened comes too late.
    page.evaluate(
        """const row = document.querySelector("details");
        row.addEventListener("toggle", event => event.stopImmediatePropagation(), {capture: true});
        row.querySelector("summary").click();"""
    )
    place(server, "another", "7Gi", "l4-0008")
    devices = page.get_by_role("table", name="Devices of l4-0008")
    expect(devices.get_by_role("link", name="team-a/another").first).to_be_visible()


def test_what_if_shows_placements(readings: Looked) -> None:
    page = readings.open("/what-if")
    page.get_by_label("Pods to add").fill("2")
    page.get_by_label("GPU memory of each pod").fill("70Gi")
    page.get_by_label("Nodes to drain").fill("l4-0000")
    page.get_by_role("button", name="What if?").click()
    expect(page.locator("#answer")).to_contain_text("all 3 pods are placed")
    goes = page.get_by_role("table", name="Placements")
    expect(goes.get_by_role("row").filter(has_text="team-a/runs")).to_contain_text("l4-0000")
    expect(goes.get_by_role("row").filter(has_text="asked-0-1")).to_contain_text("h100")
    page.get_by_label("Modes to change").fill("h100=steered")
    page.get_by_role("button", name="What if?").click()
    steered = page.get_by_role("row").filter(has_text="asked-0-1")
    expect(steered).to_contain_text("GPU-h100-")
    page.get_by_label("Modes to change").fill("h100:steered")
    page.get_by_role("button", name="What if?").click()
    expect(page.locator("#answer")).to_have_text(
        "h100:steered is not NODE=MODE. Example: gpu-a=steered"
    )
    page.get_by_label("Modes to change").fill("")
    page.get_by_label("Nodes to add").fill("h100")
    page.get_by_role("button", name="What if?").click()
    expect(page.locator("#answer")).to_have_text("h100 is not NODE=COUNT. Example: gpu-a=2")
    expect(page.get_by_label("Nodes to add")).to_be_focused()
    expect(page.get_by_label("Nodes to add")).to_have_attribute("aria-invalid", "true")


def test_what_if_compares_the_cluster_before_and_after_all_kinds_of_change(
    readings: Looked, server: Server
) -> None:
    page = readings.open("/what-if?count=10&vram=60Gi&drain=l4-0000&replicas=l4-0002%3D8")
    rows = page.get_by_role("table", name="Before and after").get_by_role("row")
    # Eight of the pods get a GPU each; the pods of the drained node move to another one.
    bound = server.get("/v1/pods?state=bound").json()["matching"]
    expect(rows.nth(1).get_by_role("cell")).to_have_text(
        ["Pods placed", str(bound), str(bound + 8), "+8"]
    )
    expect(rows.nth(2).get_by_role("cell")).to_have_text(
        ["Pods that would not fit", "0", "2", "+2"]
    )
    expect(page.locator("#answer")).to_contain_text(
        "2 pods would not fit: default/asked-0-8, default/asked-0-9. 59 nodes: "
    )
    page.get_by_label("Pods to add").fill("13")
    page.get_by_label("Modes to change").fill("l4-0001=steered")
    page.keyboard.press("Enter")
    expect(rows.nth(2)).to_contain_text("+5")
    expect(page.locator("#answer")).to_contain_text("default/asked-0-10 and 2 more. ")
    assert page.evaluate(CONTRASTS) == []
    page.reload()
    expect(rows.nth(2)).to_contain_text("+5")
    # `kubectl headroom whatif` prints the same words and figures.
    asked = {
        "pods": [{"count": 13, "vram": "60Gi", "gpus": 1}],
        **{"drain": ["l4-0000"], "replicas": {"l4-0002": 8}, "modes": {"l4-0001": "steered"}},
    }
    printed = tables.before_and_after(server.debug_post("/v1/whatif", asked).json()).rows
    shown = [row.get_by_role("cell").all_inner_texts() for row in rows.all()[1:]]
    assert [row[0] for row in shown] == [row[0] for row in printed]
    assert shown == [list(row) for row in printed]
    assert [row[3] for row in shown[:5]] == ["+8", "+5", "+480.0 GiB", shown[3][3], "-2"]
    assert shown[4][1:3] == ["128", "126"]
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_changes_are_listed_with_their_cause(readings: Looked) -> None:
    page = readings.open("/changes")
    table = page.get_by_role("table", name="Changes, the latest first")
    reserved = table.get_by_role("row").filter(has_text="reservation made").last
    expect(reserved).to_contain_text("bind")
    expect(reserved).to_contain_text("team-a/runs")
    unhealthy = table.get_by_role("row").filter(has_text="device unhealthy")
    expect(unhealthy).to_contain_text("XID 79")


def test_it_receives_every_kind_of_change() -> None:
    script = (ROOT / "extender/console/page/app.js").read_text(encoding="utf-8")
    received = set(re.findall(r'"(\w+)"', script.partition("const KINDS = [")[2].partition("]")[0]))
    assert received == KINDS.keys()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_dark(readings: Looked, scheme: Any) -> None:
    readings.page.emulate_media(color_scheme=scheme)
    page = readings.open("/nodes")
    page.locator("summary").first.click()
    expect(page.locator("table")).to_be_visible()
    faint = page.evaluate(CONTRASTS)
    assert faint == []


#: Elements with text of their own whose contrast is below the 4.5 of WCAG AA.
CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgb = colour => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = element => {
    for (let e = element; e; e = e.parentElement) {
      const found = rgb(getComputedStyle(e).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("body *:not(noscript)")]
    .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
    .filter(e => e.checkVisibility() && !e.disabled)
    .map(e => [e, light(rgb(getComputedStyle(e).color)), light(ground(e))])
    .map(([e, a, b]) => [e.textContent, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)])
    .filter(([, ratio]) => ratio < 4.5);
}"""


def test_a_telephone_shows_it_without_scrolling_sideways(readings: Looked) -> None:
    readings.page.set_viewport_size({"width": 390, "height": 800})
    page = readings.open("/nodes")
    expect(page.locator("summary").first).to_be_visible()
    for where in (
        "/overview",
        "/fleet",
        "/fleet/l4-0000/0",
        "/nodes",
        "/pools",
        "/pods",
        "/teams",
        "/pending",
        "/pod/team-a/large",
        "/what-if?count=60&vram=60Gi",
        "/recommendations",
        "/idle",
        "/changes",
        "/drift",
    ):
        readings.open(where)
        page.reload()
        expect(page.locator("#live")).to_contain_text("As of")  # the view has been read
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate("document.documentElement.scrollHeight") <= 6 * 800


def test_a_map_of_5000_nodes_is_at_most_four_screens_of_a_phone_high(readings: Looked) -> None:
    page = readings.open("/fleet")
    heights = page.evaluate(
        """async () => {
          const {SIDES, layOut} = await import("./page/tiles.js");
          const nodes = Array(5000).fill({devices: Array(8).fill({})});
          return SIDES.map(side => layOut([{name: "", title: "", nodes}], 364, side).height);
        }"""
    )
    assert heights[0] == 30 + 250 * 10 + 8
    assert heights[0] <= 4 * 800 < heights[1]


@pytest.mark.parametrize(("motion", "seconds"), [("reduce", "0s"), ("no-preference", "0.3s")])
def test_bars_move_only_if_the_reader_allows_motion(
    readings: Looked, motion: Any, seconds: str
) -> None:
    readings.page.emulate_media(reduced_motion=motion)
    page = readings.open("/nodes")
    part = page.locator(".bar i").first
    expect(part).to_have_css("transition-duration", seconds)


@pytest.mark.slow
def test_a_gone_extender_is_shown_and_earlier_data_stays(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that it only observed."""
    monkeypatch.setenv("HEADROOM_MODE", "observe")
    page: Page = browser.new_page()
    with serving("nodes: [{name: a, gpus: 1, memory: 8Gi}]") as server:
        page.goto(f"{server.debug}/#/nodes")
        expect(page.locator("#found")).to_have_text("1 to 1 of 1 node")
        expect(page.locator("#observes")).to_contain_text("Mode observe")
        expect(page.locator("#observes")).to_be_visible()
    expect(page.locator("#live")).to_have_text(
        re.compile(r"Not up to date since \d\d:\d\d:\d\d \S+: the console does not answer"),
        timeout=20_000,
    )
    expect(page.locator("#found")).to_have_text("1 to 1 of 1 node")
    page.close()


@pytest.mark.slow
def test_the_age_of_each_input_is_shown_and_which_are_out_of_date(
    browser: Browser, tmp_path: Path
) -> None:
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    config = tmp_path / "config.yaml"
    config.write_text(f"extenders: ['{nobody}']\n")
    page: Page = browser.new_page()
    with serving("nodes: [{name: a, gpus: 1, memory: 8Gi}]", "--config", str(config)) as server:
        page.goto(f"{server.debug}/#/nodes")
        inputs = page.locator("#inputs")
        expect(inputs).to_contain_text(re.compile(r"Agents: \d+ s ago"))
        late = inputs.locator(".bad")
        expect(late).to_contain_text(f"Extender {nobody}: no contact yet, ", timeout=20_000)
        expect(late).to_contain_text("refused")
    page.close()


def test_nothing_but_its_own_files_may_be_loaded(server: Server) -> None:
    for path in ("/", "/page/app.js", "/page/page.css"):
        answered = server.get(path)
        assert answered.status == 200
    assert server.get("/page/../../journal.py").status == 404
    missing = server.get("/page/none.js")
    assert missing.status == 404
    assert "the page has no file 'none.js'" in missing.json()["detail"]


def test_a_foreign_script_does_not_run(readings: Looked) -> None:
    readings.expected = "Content Security Policy"
    page = readings.open("/nodes")
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), "
        "{textContent: 'window.ran = true'}))"
    )
    assert page.evaluate("window.ran") is None


def test_the_pending_page_shows_what_steering_would_place(readings: Looked) -> None:
    sentence = "1 pending pod with 16.0 GiB waits; steering 1 node would place it"
    to_do = "kubectl annotate --overwrite node a headroom.gpu/device-choice=steered"

    def with_steering(route: Route) -> None:
        response = route.fetch()
        body = response.json()
        assert body["steering"] is None  # the only pending pod is larger than any GPU
        body["steering"] = {"sentence": sentence, "to_do": to_do}
        route.fulfill(response=response, json=body)

    readings.page.route("**/v1/pending?*steering=true*", with_steering)
    page = readings.open("/pending")
    expect(page.get_by_text(f"{sentence}. To do: {to_do}")).to_be_visible()


def test_the_idle_page_shows_who_holds_what(readings: Looked) -> None:
    sums = {"held_bytes": 12 << 30, "gpus_ratio": 0.5, "gpu_days": 1.0, "cost": 60.0}
    team = {"namespace": "team-a", "pods": 1, **sums}
    idle_pod = {
        **{"namespace": "team-a", "name": "notebook", "node": "l4-0000", "device": "GPU-l4-0000-0"},
        **{"idle_s": 172_800.0, "idle_since": "2026-11-19T00:00:00Z", "gpu_ratio": 0.5},
        **{key: sums[key] for key in ("held_bytes", "gpu_days", "cost")},
    }
    asked: list[str] = []

    def idle(route: Route) -> None:
        asked.append(route.request.url)
        body = route.fetch().json()
        body |= {"gpu_hour_price": 2.5, "devices_without_sm_activity": 3, "pods": [idle_pod]}
        body |= {"teams": [team], "owners": [team | {"kind": "StatefulSet", "name": "notebook"}]}
        route.fulfill(json=body)

    page = readings.open("/idle")
    # This server's devices measure no SM activity.
    status = page.get_by_role("status").filter(has_text="Not checked")
    expect(status).to_have_text(
        "No such pod. Not checked: 128 devices without a measurement of SM activity."
    )
    page.route("**/v1/idle?*", idle)
    page.get_by_label("Idle for at least").fill("24")
    page.get_by_label("and holding at least").fill("8Gi")
    page.get_by_role("button", name="Show").click()
    expect(status).to_have_text(
        "1 pod held 1.00 GPU days without using them. "
        "Not checked: 3 devices without a measurement of SM activity."
    )
    assert asked[-1].endswith("/v1/idle?hours=24&held=8Gi")
    for name, cells in (
        ("By namespace", ["team-a", "1", "12.0 GiB", "0.50", "1.00", "60.00"]),
        ("By owner", ["team-a", "StatefulSet notebook", "1", "12.0 GiB", "0.50", "1.00", "60.00"]),
    ):
        row = page.get_by_role("table", name=name).get_by_role("row").nth(1)
        assert row.get_by_role("cell").all_inner_texts() == cells
    pods = page.get_by_role("table", name="Pods, the most wasteful first")
    expect(pods.get_by_role("link", name="team-a/notebook")).to_be_visible()
    expect(pods).to_contain_text("2d")


def test_the_idle_page_has_the_costs_of_a_range(readings: Looked) -> None:
    hours = {
        **{"held_gpu_hours": 1440.0, "used_gpu_hours": 1000.0, "idle_gpu_hours": 400.0},
        **{"unmeasured_gpu_hours": 40.0, "held_gib_days": 720.0, "unused_gib_days": 300.5},
        **{"unmeasured_gib_days": 0.0, "cost": 3600.0, "idle_cost": 1000.0},
    }

    def costs(route: Route) -> None:
        body = route.fetch(url=route.request.url.replace("since=30d", "since=1h")).json()
        body |= {"gpu_hour_price": 2.5, "covered_s": 600 * 3600, "from_s": 0, "to_s": 720 * 3600}
        body |= {"namespaces": [{"namespace": "team-a", **hours}], "total": hours}
        route.fulfill(json=body)

    page = readings.open("/idle")
    page.route("**/v1/costs?since=30d", costs)
    page.get_by_label("In", exact=True).select_option("the last 30 days")
    status = page.get_by_role("status").filter(has_text="Pods held")
    expect(status).to_have_text(
        "Pods held 1,440.00 GPU hours and left 400.00 idle, which cost 1,000.00 of 3,600.00. "
        "Recorded: 600.0 of 720.0 hours."
    )
    sums = page.get_by_role("table", name="GPU hours by namespace, the most idle first")
    cells = sums.get_by_role("row").nth(1).get_by_role("cell").all_inner_texts()
    figures = ["1,440.00", "1,000.00", "400.00", "40.00", "720.00", "300.50"]
    assert cells == ["team-a", *figures, "3,600.00", "1,000.00"]
    # This server has no Prometheus.
    readings.expected = "503"
    page.get_by_label("In", exact=True).select_option("the last 7 days")
    expect(page.get_by_text("Not available: the console has the last hour")).to_be_visible()


def test_the_recommendations_page_simulates_on_request(readings: Looked) -> None:
    """The server records no lives, so the test answers for it."""
    freed = {"namespace": "team-a", "reclaimable_bytes": 21 << 30}
    team = {**freed, "owners": [{**freed, "kind": "StatefulSet", "name": "nb", "pods": 3}]}
    row = {
        **{"namespace": "team-a", "owner_kind": "StatefulSet", "owner_name": "nb", "family": False},
        **{"container": "main", "model": "L4", "pods": 3, "current_bytes": 16 << 30},
        **{"request_bytes": 9 << 30, "reclaimable_bytes": 21 << 30, "setting": ""},
        "message": "12 lives, 9 days; 0 of 9 were above the recommendation",
    }
    accepted = {"message": "3 pods created again", "not_checked": ["CPU"]}
    asked: list[str] = []

    def recorded(route: Route) -> None:
        asked.append(route.request.url.partition("/v1/")[2])
        body = route.fetch().json()
        assert body["recommendations"] == []
        body |= {"recommendations": [row], "teams": [team]}
        if "accepted" in route.request.url:
            body["accepted"] = accepted
        route.fulfill(json=body)

    page = readings.open("/recommendations")
    expect(page.get_by_text("No lives of containers are recorded.")).to_be_visible()
    page.route("**/v1/recommendations*", recorded)
    page.get_by_label("Namespace").fill("team-a")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_text("Lower requests would free 21.0 GiB.")).to_be_visible()
    for name, cells in (
        ("By namespace", ["team-a", "21.0 GiB", "StatefulSet nb (3 pods, 21.0 GiB)"]),
        (
            "By container, the largest difference first",
            [
                *("team-a/nb\nStatefulSet", "main\nL4", "3", "16.0 GiB", "9.0 GiB", "21.0 GiB"),
                row["message"],
            ],
        ),
    ):
        found = page.get_by_role("table", name=name).get_by_role("row").nth(1)
        assert found.get_by_role("cell").all_inner_texts() == cells
    page.get_by_role("button", name="Simulate that all are accepted").click()
    expect(page.get_by_text("Simulated: 3 pods created again. Not checked: CPU.")).to_be_visible()
    assert asked == [
        "recommendations?namespace=team-a",
        "recommendations?namespace=team-a&accepted=true",
    ]


def test_names_are_text_whatever_they_hold(readings: Looked, server: Server) -> None:
    name = "<img src=x onerror=alert(1)>"
    ask(server, name, "90Gi", ["h100"])
    try:
        page = readings.open("/pending")
        expect(page.get_by_role("link", name=f"team-a/{name}")).to_be_visible()
        assert page.locator("table img").count() == 0
    finally:
        assert server.delete(f"/embedded/v1/pods/team-a/{name}".replace(" ", "%20")).status == 204
