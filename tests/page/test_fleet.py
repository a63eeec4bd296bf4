"""Tests the map of the fleet (groups, zoom, names) and the marks in the plots of a GPU, in
Chromium.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.page.conftest import GIB, Looked, report
from tests.processes import starts_processes
from tests.serving import Server, serving
from tests.waiting import until

ZONE = "topology.kubernetes.io/zone"
FLEET = f"""\
nodes:
  - name: east
    count: 3
    gpus: 2
    memory: 24Gi
    model: L4
    sharing: time-slicing
    replicas: 4
    labels: {{{ZONE}: europe-west4-a}}
  - {{name: west, gpus: 4, memory: 24Gi, model: L4, labels: {{{ZONE}: europe-west4-b}}}}
  - {{name: none, gpus: 1, memory: 24Gi, model: L4}}
"""
UUID = "5e8a1b2c-1b2c-3d4e-5f60-718293a4b5c6"


@pytest.fixture(scope="module")
@starts_processes
def server() -> Iterator[Server]:
    with serving(FLEET) as started:
        yield started


def titles(page: Page) -> list[str]:
    """Draw the map again. Return the strings that it draws on its canvas."""
    page.evaluate(
        """() => {
            window.written = [];
            window.write ??= CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
                window.written.push(text); return window.write.call(this, text, ...at);
            };
            dispatchEvent(new Event("resize"));
        }"""
    )
    until(lambda: page.evaluate("window.written.length") > 0, "a map that is drawn")
    written: list[str] = page.evaluate("window.written.splice(0)")
    return written


def until_grouped(page: Page, groups: list[str]) -> None:
    """Wait until the map has these groups, because it may draw several times."""
    until(
        lambda: list(dict.fromkeys(text for text in titles(page) if "GPU" in text)) == groups,
        f"a map with the groups {groups}",
    )


def test_the_map_is_grouped_by_the_typed_label(readings: Looked) -> None:
    page = readings.open("/fleet")
    expect(page.locator("#found")).to_have_text("11 GPUs on 5 nodes")
    label = page.get_by_label("Label")
    expect(label).to_be_hidden()
    until_grouped(page, ["no pool: 5 nodes, 11 GPUs"])
    page.get_by_label("Group by").select_option("a label")
    expect(label).to_be_visible()
    with page.expect_response(re.compile(r"/v1/map\?.*label=topology")):
        label.fill(ZONE)
        label.press("Enter")
    assert page.url.endswith("#/fleet?group=label&label=topology.kubernetes.io%2Fzone")
    groups = [
        "europe-west4-a: 3 nodes, 6 GPUs",
        "europe-west4-b: 1 node, 4 GPUs",
        "no such label: 1 node, 1 GPU",
    ]
    expect(page.locator("#found")).to_have_text("11 GPUs on 5 nodes")
    until_grouped(page, groups)
    page.reload()
    expect(page.locator("#found")).to_have_text("11 GPUs on 5 nodes")
    until_grouped(page, groups)
    # The arrow keys move from group to group.
    page.get_by_role("listbox").focus()
    tile = page.get_by_role("option", include_hidden=True)
    for node in ("east-0000", "west", "none"):
        expect(tile.filter(has_text=f"{node} GPU 0")).to_have_count(1)
        page.keyboard.press("ArrowDown")


def test_the_zoom_of_the_map_is_in_the_url_and_names_appear_from_the_fifth_step_on(
    readings: Looked,
) -> None:
    page = readings.open("/fleet?zoom=0")
    expect(page.locator("#found")).to_have_text("11 GPUs on 5 nodes")
    heights = []
    for step in range(7):
        if step:
            page.get_by_role("button", name="Zoom in").click()
            assert page.url.endswith(f"#/fleet?zoom={step}")
        assert ("east-0000" in titles(page)) == (step >= 5)
        heights.append(page.get_by_role("listbox").bounding_box()["height"])  # type: ignore[index]
    assert heights == sorted(heights)
    assert heights[6] > heights[0]
    page.get_by_role("button", name="Zoom in").click()
    assert page.url.endswith("#/fleet?zoom=6")
    page.get_by_role("button", name="Zoom out").click()
    page.reload()
    expect(page.locator("#found")).to_have_text("11 GPUs on 5 nodes")
    assert page.get_by_role("listbox").bounding_box()["height"] == heights[5]  # type: ignore[index]


def test_gpus_without_an_index_and_mig_devices_are_opened_by_a_prefix_of_their_uuid(
    readings: Looked, server: Server
) -> None:
    instance = {"kind": "mig", "index": 0, "parent": "GPU-other"}
    report(
        server,
        "west",
        {"uuid": f"GPU-{UUID}", "index": -1, "healthy": False, "health_reason": "XID 79"},
        {**instance, "uuid": f"MIG-{UUID}", "gpu_instance": 1, "used_bytes": GIB},
        {**instance, "uuid": f"MIG-6{UUID[1:]}", "gpu_instance": 2, "used_bytes": 2 * GIB},
    )
    page = readings.open("/overview")
    broken = page.get_by_role("region", name="Broken").get_by_role("listitem")
    expect(broken).to_contain_text("GPU-5e8a1b2c of west is unhealthy: XID 79")
    expect(broken).to_contain_text(f"kubectl headroom cordon west GPU-{UUID} --evict")
    broken.get_by_role("link", name="west GPU-5e8a1b2c", exact=True).click()
    detail = page.get_by_role("complementary")
    expect(detail.get_by_role("heading", level=3)).to_have_text("west GPU-5e8a1b2c, L4")
    assert page.url.endswith("#/fleet/west/GPU-5e8a1b2c")
    for name, used in (("MIG-5e8a1b2c", "1.0 GiB"), ("MIG-6e8a1b2c", "2.0 GiB")):
        readings.open(f"/fleet/west/{name}")
        expect(detail.get_by_role("heading", level=3)).to_have_text(f"west {name}, L4")
        expect(detail).to_contain_text(f"{used} in use")
    readings.open("/nodes?find=west")
    page.locator("summary").click()
    devices = page.get_by_role("table", name="Devices of west")
    expect(devices).to_contain_text("GPU-5e8a1b2c")
    expect(page.locator("body")).not_to_contain_text("GPU -1")


def test_an_eviction_is_marked_in_the_plots_of_its_gpu(readings: Looked, server: Server) -> None:
    """The event has the format of ``feed`` (tests/console/test_change_feed.py)."""
    report(server, "east-0000", {"used_bytes": 6 * GIB, "unattributed_bytes": 6 * GIB}, {})
    evicted: list[dict[str, Any]] = []

    def with_eviction(route: Route) -> None:
        body = route.fetch().json()
        route.fulfill(json=body | {"events": [*body["events"], *evicted]})

    readings.expected = (
        "willReadFrequently"  # The browser warns because the plots are read more than once.
    )
    readings.page.route("**/v1/events?*", with_eviction)
    page = readings.open("/fleet/east-0000/0")
    detail = page.get_by_role("complementary", name="east-0000 GPU 0, L4")
    memory = detail.get_by_role("group", name="Memory")
    expect(memory.locator("canvas")).to_be_visible()
    assert reddest(memory) == []
    at = datetime.now(UTC) - timedelta(minutes=30)
    evicted.append(
        {
            **{"at": at.isoformat(), "number": 999},
            **{"kind": "reservation_changed", "cause": "is_to_leave", "node": "east-0000"},
            **{"device": "GPU-east-0000-0", "uid": "uid-leaks", "namespace": "team-a"},
            **{"name": "leaks", "message": "", "decision_id": "", "generation": 1},
        }
    )
    page.reload()
    entry = detail.get_by_role("listitem").filter(has_text="to be evicted")
    expect(entry).to_have_text(re.compile(r"^E \d\d:\d\d to be evicted: team-a/leaks$"))
    expect(entry.get_by_role("link")).to_have_attribute("href", "#/pod/team-a/leaks")
    for plot in (memory, detail.get_by_role("group", name="SM activity")):
        # Wait, because the plot is drawn after its list. The line and its letter move to the left
        # with time.
        until(lambda plot=plot: len(reddest(plot)) > 20, "a mark in the plot")
        share = 1 - (datetime.now(UTC) - at).total_seconds() / 3600
        assert all(each == pytest.approx(share, abs=0.03) for each in reddest(plot))


def reddest(plot: Any) -> list[float]:
    """Return the horizontal positions of the mark's color in the plot, as shares of the plot's
    width.
    """
    shares: list[float] = plot.evaluate(
        """element => {
            const probe = element.appendChild(document.createElement("i"));
            probe.style.color = "var(--bad)";
            const bad = getComputedStyle(probe).color.match(/[\\d.]+/g).map(Number);
            probe.remove();
            const canvas = element.querySelector("canvas"), {width, height} = canvas;
            const all = canvas.getBoundingClientRect();
            const area = element.querySelector(".u-over").getBoundingClientRect();
            const {data} = canvas.getContext("2d").getImageData(0, 0, width, height), found = [];
            for (let i = 0; i < data.length; i += 4) {
                const near = bad.slice(0, 3).every((part, k) => Math.abs(part - data[i + k]) < 12);
                if (!near || data[i + 3] < 60) continue;
                const x = (i / 4 % width) * all.width / width;
                found.push((x - (area.left - all.left)) / area.width);
            }
            return found;
        }"""
    )
    return shares
