"""Tests the page in Chromium: overview, map and nodes."""

import re

import pytest
from playwright.sync_api import Route, expect

from tests.page.conftest import CONTRASTS, Looked, place
from tests.serving import Server
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


def test_the_overview_links_to_the_gpu_and_to_the_pod(readings: Looked) -> None:
    page = readings.open("/overview")
    risk = page.get_by_role("region", name="At risk")
    expect(risk).to_contain_text("All is well: no GPU is overcommitted")
    expect(page.get_by_role("group", name="Memory of the fleet")).to_be_visible()
    waiting = page.get_by_role("region", name="Waiting").get_by_role("listitem")
    expect(waiting).to_contain_text("no node can take the pod")
    for name, count in (("At risk", ""), ("Waiting", "1 pod"), ("Broken", "1 problem")):
        heading = page.get_by_role("heading", name=f"{name} {count}".strip(), exact=True)
        expect(heading).to_be_visible()
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


def test_empty_lists_of_the_overview_show_that_all_is_well(readings: Looked) -> None:
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


def test_a_gpu_shows_modes_taints_cordons_and_unattributed_memory(readings: Looked) -> None:
    def changed(route: Route) -> None:
        body = route.fetch().json()
        if "device" in body:
            body["device"] |= {"kind": "mig", "cordoned": True, "driver_reserve_bytes": 1 << 30}
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
            *("24.0 GiB free for reservation", "0.0 GiB in use", "SM activity -", "MIG device"),
            *("time-slicing, 4 of 4 replicas free", "GPU of the next pod: steered by Headroom"),
            re.compile(r"report \d+\w old"),
        ]
    )
    bar = detail.get_by_role("list", name="Memory of the GPU, 24.0 GiB").get_by_role("listitem")
    names = ["3.0 GiB unattributed", "1.0 GiB driver reserve, 0.0 GiB reserve of the node"]
    expect(bar).to_have_count(2)
    for part, name in zip(bar.all(), names, strict=True):
        expect(part).to_have_accessible_name(name)


def test_the_map_works_by_keyboard_and_keeps_its_choices_in_the_url(readings: Looked) -> None:
    readings.page.emulate_media(color_scheme="dark")
    page = readings.open("/fleet?group=model&colour=used")
    expect(page.locator("#found")).to_have_text("128 GPUs on 61 nodes")
    page.get_by_role("listbox").focus()
    tile = page.get_by_role("listbox", name="GPUs").get_by_role("option")
    expect(tile).to_have_text("h100 GPU 0, H100 80.0 GiB: 0 % reserved, 0 % in use, SM unknown")
    # The key moves to the second line of the node's tiles, and then to the first node of the next
    # group.
    for _ in range(2):
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


def test_tiles_have_the_colours_of_their_states(readings: Looked) -> None:
    page = readings.open("/fleet")
    drawn = page.evaluate(TILES)
    healthy, closed, unhealthy, cordoned, over = drawn["tiles"]
    plain, line, text, bad = drawn["plain"], drawn["quiet"], drawn["text"], drawn["bad"]
    assert healthy == {"corner": plain, "middle": plain, "edge": plain}
    assert closed == {"corner": plain, "middle": line, "edge": plain}
    assert unhealthy == {"corner": text, "middle": text, "edge": plain}
    # The line begins in the lower left corner, and the corner mark is in the upper left corner.
    assert cordoned == {"corner": plain, "middle": text, "edge": plain}
    assert over == {"corner": bad, "middle": plain, "edge": bad}
    assert drawn["dimmed"][3] == 0x26
    assert drawn["between"] == [0, 0, 0, 0]


#: Draws a node for each state on a canvas with two pixels per CSS pixel, and returns the pixels.
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
    # Up to 64 MiB of unattributed use are ignored on each device, so the bar does not show them.
    (unattributed, free) = widths()
    assert (unattributed[0], free[0]) == ("unattributed", "free")
    assert unattributed[1] / free[1] == pytest.approx(19.94 / 4.06, rel=0.05)


def test_an_unknown_use_is_not_shown_as_a_number(readings: Looked) -> None:
    """The API has -1 for devices whose use the driver does not report."""

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
    expect(holders.last).not_to_contain_text("capped")  # The pod is on the other candidate device.
    expect(holders.last).not_to_contain_text("evicted")


def test_nodes_with_faults_are_found_and_opened_by_keyboard(readings: Looked) -> None:
    page = readings.open("/nodes")
    page.get_by_label("only where something is wrong").check()
    expect(page.locator("#found")).to_have_text("1 to 1 of 1 node")
    page.get_by_label("Search").focus()
    for _ in range(2):  # Tab moves to the checkbox, and then to the node.
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    devices = page.get_by_role("table", name="Devices of l4-0059")
    expect(devices).to_contain_text("24.0 GiB - 20.0 GiB unattributed = 4.0 GiB")
    expect(devices).to_contain_text("unhealthy")
    page.keyboard.press("Enter")
    expect(devices).to_have_count(0)


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


def test_a_row_that_is_replaced_while_it_is_opened_stays_open(
    readings: Looked, server: Server
) -> None:
    page = readings.open("/nodes")
    page.get_by_label("Search").fill("l4-0008")
    expect(page.locator("#found")).to_have_text("1 to 1 of 1 node")
    expect(page.locator("#live")).to_contain_text("live")
    # The toggle event arrives too late.
    page.evaluate(
        """const row = document.querySelector("details");
        row.addEventListener("toggle", event => event.stopImmediatePropagation(), {capture: true});
        row.querySelector("summary").click();"""
    )
    place(server, "another", "7Gi", "l4-0008")
    devices = page.get_by_role("table", name="Devices of l4-0008")
    expect(devices.get_by_role("link", name="team-a/another").first).to_be_visible()


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
