"""Makes the pictures of the docs from the running product: python -m benchmarks.pictures [FOLDER]

The default folder is docs/images. With --all, it also makes pictures of each view in light and dark
and on a phone, as whole pages, for inspection. It takes two minutes, until the console finds the
GPU that is full soon, and one minute for the plan. The plots leave out the seconds in which the
fleet is filled."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from benchmarks.pictures import FILES, architecture, device_choice, plan_report, terminal
from benchmarks.pictures.fleet import (
    LEAK,
    ONE_NODE,
    WAITING,
    WAITING_GIB,
    PicturedFleet,
    ask,
    fleet_yaml,
)
from headroom.console.history.history import RESOLUTION_S
from tests.debian import chromium
from tests.serving import Server, serving

#: Pictures of the page: name -> view, height, and whether they show the header.
PICTURES = {
    "overview": ("/overview", 690, True),
    "fleet": ("/fleet?group=model", 680, False),
    "gpu": ("/fleet/l4-0007/0?group=model", 700, True),
}
POD = f"/pod/ml/{WAITING}"
VIEWS = {
    "overview": "/overview",
    "fleet": "/fleet?group=model",
    "gpu": "/fleet/l4-0007/0?group=model",
    "nodes": "/nodes",
    "pods": "/pods",
    "teams": "/teams",
    "team": "/teams/research",
    "pending": "/pending",
    "pod-waiting": "/pod/research/pretrain-b7xq2",
    "pod-running": f"/pod/search/{LEAK}",
    "what-if": "/what-if?count=10&vram=60Gi&drain=l4-0007",
    "recommendations": "/recommendations",
    "idle": "/idle",
    "changes": "/changes",
    "drift": "/drift",
}
#: Maximum size of a picture.
MOST_BYTES = 150_000
#: As narrow as the page's header permits, because GitHub shows pictures at about 800 pixels.
DOCS_WIDTH = 1140
#: Maximum height of the header in pixels.
MOST_HEADER = 400
#: Size of pictures without the header.
NARROW = {"width": 900, "height": 590}
REPORT = {"width": 900, "height": 700}
SCREEN = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}


def main(
    folder: Annotated[Path, typer.Argument(help="Folder for the pictures.")] = Path("docs/images"),
    all_views: Annotated[bool, typer.Option("--all", help="Make pictures of each view.")] = False,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawing in (("architecture", architecture), ("device-choice", device_choice)):
        (folder / f"{name}.svg").write_text(drawing.draw(), encoding="utf-8")
    program, environment = chromium()
    with TemporaryDirectory() as scratch, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, env=dict(environment), args=["--no-sandbox"]
        )
        _report(browser, plan_report.report(Path(scratch)), folder / "plan.png")
        with _one_node() as server:
            path = folder / "pod.png"
            _view(browser, server, POD, "light", NARROW, path, (0, 0), header=False)
            why = terminal.command(server.debug, "why", f"ml/{WAITING}")
            _terminal(browser, why, folder / "why.png")
        with _served(browser) as (server, filling):
            for name, (view, height, header) in PICTURES.items():
                size, path = {"width": DOCS_WIDTH, "height": height}, folder / f"{name}.png"
                _view(browser, server, view, "light", size, path, filling, header=header)
            for name, view in VIEWS.items() if all_views else ():
                for scheme in ("light", "dark"):
                    path = folder / f"{name}-{scheme}.png"
                    _view(browser, server, view, scheme, SCREEN, path, filling, whole=True)
                path = folder / f"{name}-phone.png"
                _view(browser, server, view, "light", PHONE, path, filling, whole=True)
        browser.close()
    for name in FILES:
        size = (folder / name).stat().st_size
        print(f"{folder / name}: {size / 1000:.0f} kB")  # noqa: T201
        assert size <= MOST_BYTES, f"{folder / name} has {size} bytes"


@contextmanager
def _served(browser: Browser) -> Iterator[tuple[Server, tuple[float, float]]]:
    """Serve the fleet, with pods that wait and a GPU that is full soon.

    Also yield the Unix times at which its filling began and ended.
    """
    fleet = PicturedFleet()
    fleet.fill()
    seeded = "benchmarks.pictures.seeded", str(fleet.now_step)
    # The server's first value has the time of the step in which the server starts.
    began_s = time.time() - RESOLUTION_S
    with serving(fleet_yaml(), program=seeded) as server:
        fleet.bind(server)
        filling = began_s, time.time() + RESOLUTION_S
        l4 = [name for name in fleet.pods if "l4" in name]
        for name in ("pretrain-b7xq2", "pretrain-k2m8d", "pretrain-z5w9t"):
            ask(server, "research", name, "90Gi", list(fleet.pods))
        ask(server, "vision", "segmenter-6b7f-q8d4c", "30Gi", l4)
        with fleet.reporting(server):
            _wait_for_the_risk(browser, server)
            yield server, filling


@contextmanager
def _one_node() -> Iterator[Server]:
    """Serve one node, on which a pod waits because of the device plugin's next choice."""
    fleet = PicturedFleet(ONE_NODE)
    fleet.fill_one_node()
    with serving(fleet_yaml(ONE_NODE)) as server:
        fleet.bind(server)
        ask(server, "ml", WAITING, f"{WAITING_GIB}Gi", list(fleet.pods))
        yield server


def _wait_for_the_risk(browser: Browser, server: Server) -> None:
    page = browser.new_page()
    page.goto(f"{server.debug}/#/overview")
    risk = page.get_by_role("region", name="At risk")
    expect(risk).to_contain_text(re.compile(f"grows by .*{LEAK}"), timeout=180_000)
    page.close()


def _view(
    browser: Browser,
    server: Server,
    view: str,
    scheme: str,
    size: dict[str, int],
    path: Path,
    filling: tuple[float, float],
    *,
    whole: bool = False,
    header: bool = True,
) -> None:
    """Save the screen or the whole page. Without ``header``, save as much of the page below it."""
    # The map draws only the part that is on the screen, so the screen must also fit the header.
    screen = size if header else size | {"height": size["height"] + MOST_HEADER}
    context = browser.new_context(viewport=screen, color_scheme=scheme, timezone_id="Europe/Berlin")  # type: ignore[arg-type]
    context.route("**/v1/history/**", lambda route: _without(route, filling))
    page: Page = context.new_page()
    page.goto(f"{server.debug}/#{view}")
    expect(page.locator("#live")).to_contain_text("live", timeout=30_000)
    # The figures have arrived, but the plots are drawn in the next frames.
    page.wait_for_timeout(1500)
    if header:
        page.screenshot(path=path, full_page=whole)
    else:
        begin = page.locator("#view").bounding_box()
        assert begin is not None
        clip = {"x": 0, "y": begin["y"] - 16, **size}
        page.screenshot(path=path, full_page=True, clip=clip)  # type: ignore[arg-type]
    context.close()


def _without(route: Route, filling: tuple[float, float]) -> None:
    """Return the history without the seconds in which the fleet was filled."""
    body = route.fetch().json()
    begin_s, end_s = filling
    kept = [i for i, at_s in enumerate(body["at_s"]) if not begin_s <= at_s < end_s]
    body["at_s"] = [body["at_s"][i] for i in kept]
    for each in body["series"]:
        each["values"] = [each["values"][i] for i in kept]
    route.fulfill(json=body)


def _report(browser: Browser, report: Path, path: Path) -> None:
    """Save the report down to its first chart."""
    page = browser.new_page(viewport=REPORT)  # type: ignore[arg-type]
    page.goto(report.as_uri())
    box = page.locator("figure").first.bounding_box()
    assert box is not None
    clip = {"x": 0, "y": 0, "width": REPORT["width"], "height": box["y"] + box["height"] + 16}
    page.screenshot(path=path, full_page=True, clip=clip)  # type: ignore[arg-type]
    page.close()


def _terminal(browser: Browser, html: str, path: Path) -> None:
    page = browser.new_page(viewport={"width": 1000, "height": 700})  # type: ignore[arg-type]
    page.set_content(html)
    page.locator("body").screenshot(path=path)
    page.close()


if __name__ == "__main__":
    typer.run(main)
