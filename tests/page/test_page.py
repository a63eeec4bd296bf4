"""Tests the behavior that all views of the page share, in Chromium."""

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from headroom.console.feed.feed import KINDS
from tests.controlplane import ROOT
from tests.page.conftest import CONTRASTS, Looked
from tests.processes import free_ports
from tests.serving import Server, serving


def test_changes_are_listed_with_their_cause(readings: Looked) -> None:
    page = readings.open("/changes")
    table = page.get_by_role("table", name="Changes, the latest first")
    reserved = table.get_by_role("row").filter(has_text="reservation made").last
    expect(reserved).to_contain_text("bind")
    expect(reserved).to_contain_text("team-a/runs")
    unhealthy = table.get_by_role("row").filter(has_text="device unhealthy")
    expect(unhealthy).to_contain_text("XID 79")


def test_the_page_receives_every_kind_of_change() -> None:
    script = (ROOT / "headroom/console/page/app.js").read_text(encoding="utf-8")
    received = set(re.findall(r'"(\w+)"', script.partition("const KINDS = [")[2].partition("]")[0]))
    assert received == KINDS.keys()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast_in_light_and_dark_mode(readings: Looked, scheme: Any) -> None:
    readings.page.emulate_media(color_scheme=scheme)
    page = readings.open("/nodes")
    page.locator("summary").first.click()
    expect(page.locator("table")).to_be_visible()
    faint = page.evaluate(CONTRASTS)
    assert faint == []


def test_a_phone_shows_the_page_without_horizontal_scrolling(readings: Looked) -> None:
    readings.page.set_viewport_size({"width": 390, "height": 800})
    page = readings.open("/nodes")
    expect(page.locator("summary").first).to_be_visible()
    for where in (
        "/overview",
        "/fleet",
        "/fleet/l4-0000/0",
        "/nodes",
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
        expect(page.locator("#live")).to_contain_text("As of")  # The view has been read.
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate("document.documentElement.scrollHeight") <= 6 * 800


@pytest.mark.parametrize(("motion", "seconds"), [("reduce", "0s"), ("no-preference", "0.3s")])
def test_bars_are_animated_only_if_the_reader_allows_motion(
    readings: Looked, motion: Any, seconds: str
) -> None:
    readings.page.emulate_media(reduced_motion=motion)
    page = readings.open("/nodes")
    part = page.locator(".bar i").first
    expect(part).to_have_css("transition-duration", seconds)


@pytest.mark.slow
def test_a_missing_extender_is_shown_and_earlier_data_stays(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page also shows that the extender was in observe mode."""
    monkeypatch.setenv("HEADROOM_MODE", "observe")
    page: Page = browser.new_page()
    with serving("nodes: [{name: a, gpus: 1, memory: 8Gi}]") as server:
        page.goto(f"{server.debug}/#/nodes")
        expect(page.locator("#found")).to_have_text("1 to 1 of 1 node")
        expect(page.locator("#observes")).to_contain_text("Mode observe")
        expect(page.locator("#observes")).to_be_visible()
    expect(page.locator("#live")).to_have_text(
        re.compile(r"Not up to date since \d\d:\d\d:\d\d \S+: the console does not answer"),
    )
    expect(page.locator("#found")).to_have_text("1 to 1 of 1 node")
    page.close()


@pytest.mark.slow
def test_the_age_of_each_input_is_shown_and_outdated_inputs_are_marked(
    browser: Browser, tmp_path: Path
) -> None:
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    config = tmp_path / "config.yaml"
    config.write_text(f"extenders: ['{nobody}']\n")
    page: Page = browser.new_page()
    with serving("nodes: [{name: a, gpus: 1, memory: 8Gi}]", "--config", str(config)) as server:
        page.goto(f"{server.debug}/#/nodes")
        inputs = page.locator("#inputs")
        expect(inputs).to_contain_text(re.compile(r"Last contact *Agents: \d+ s ago"))
        late = inputs.locator(".bad")
        expect(late).to_contain_text(f"Extender {nobody}: no contact yet, ")
        expect(late).to_contain_text("refused")
    page.close()


def test_only_the_pages_own_files_may_be_loaded(server: Server) -> None:
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
