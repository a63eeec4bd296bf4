"""Makes the pictures of the docs from the running page: python -m benchmarks.pictures [FOLDER]

Default folder: docs/images. With --all it also makes pictures of each view in light and dark and on
a phone, whole pages, to look at. It takes two minutes, in which the console sees which GPU is full
soon. The plots leave out the seconds in which the fleet is filled.
"""

import re
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from benchmarks.pictured_fleet import LEAK, PicturedFleet, ask, fleet_yaml, replaced_console
from extender.state.history import RESOLUTION_S
from tests.debian import chromium
from tests.serving import Server, serving

#: Pictures of the docs: name -> view, and color scheme.
PICTURES = {
    "overview": ("/overview", "light"),
    "gpu": ("/fleet/l4-0007/0?group=model", "light"),
}
VIEWS = {
    "overview": "/overview",
    "fleet": "/fleet?group=model",
    "gpu": "/fleet/l4-0007/0?group=model",
    "nodes": "/nodes",
    "pools": "/pools",
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
MOST_BYTES = 300_000
SCREEN = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}


def main(
    folder: Annotated[Path, typer.Argument(help="Where the pictures go.")] = Path("docs/images"),
    all_views: Annotated[bool, typer.Option("--all", help="Make pictures of each view.")] = False,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    fleet = PicturedFleet()
    fleet.fill()
    program, environment = chromium()
    with (
        TemporaryDirectory() as settings,
        replaced_console(fleet.history()) as replaced,
        sync_playwright() as playwright,
    ):
        config = Path(settings, "config.yaml")
        config.write_text(f"consoles: ['{replaced}']\n", encoding="utf-8")
        browser = playwright.chromium.launch(
            executable_path=program, env=dict(environment), args=["--no-sandbox"]
        )
        began_s = time.time()
        with serving(fleet_yaml(), "--config", str(config)) as server:
            fleet.bind(server)
            filling = began_s, time.time() + RESOLUTION_S
            for name in ("pretrain-b7xq2", "pretrain-k2m8d", "pretrain-z5w9t"):
                ask(server, "research", name, "90Gi", list(fleet.pods))
            ask(
                server,
                "vision",
                "segmenter-6b7f-q8d4c",
                "30Gi",
                [n for n in fleet.pods if "l4" in n],
            )
            with fleet.reporting(server):
                _wait_for_the_risk(browser, server)
                for name, (view, scheme) in PICTURES.items():
                    path = folder / f"{name}.png"
                    _picture(browser, server, view, scheme, SCREEN, path, filling)
                for name, view in VIEWS.items() if all_views else ():
                    for scheme in ("light", "dark"):
                        path = folder / f"{name}-{scheme}.png"
                        _picture(browser, server, view, scheme, SCREEN, path, filling, whole=True)
                    path = folder / f"{name}-phone.png"
                    _picture(browser, server, view, "light", PHONE, path, filling, whole=True)
        browser.close()
    for each in folder.glob("*.png"):
        size = each.stat().st_size
        assert all_views or size <= MOST_BYTES, f"{each} has {size} bytes"
        print(f"{each}: {size / 1000:.0f} kB")  # noqa: T201


def _wait_for_the_risk(browser: Browser, server: Server) -> None:
    page = browser.new_page()
    page.goto(f"{server.debug}/#/overview")
    risk = page.get_by_role("region", name="At risk")
    expect(risk).to_contain_text(re.compile(f"grows by .*{LEAK}"), timeout=180_000)
    page.close()


def _picture(
    browser: Browser,
    server: Server,
    view: str,
    scheme: str,
    size: dict[str, int],
    path: Path,
    filling: tuple[float, float],
    *,
    whole: bool = False,
) -> None:
    context = browser.new_context(viewport=size, color_scheme=scheme, timezone_id="Europe/Berlin")  # type: ignore[arg-type]
    context.route("**/v1/history/**", lambda route: _without(route, filling))
    page: Page = context.new_page()
    page.goto(f"{server.debug}/#{view}")
    expect(page.locator("#live")).to_contain_text("live", timeout=30_000)
    # The figures have arrived; the plots are drawn in the next frames.
    page.wait_for_timeout(1500)
    page.screenshot(path=path, full_page=whole)
    context.close()


def _without(route: Route, filling: tuple[float, float]) -> None:
    """Answer with the history without the seconds in which the fleet was filled."""
    body = route.fetch().json()
    begin_s, end_s = filling
    kept = [i for i, at_s in enumerate(body["at_s"]) if not begin_s <= at_s < end_s]
    body["at_s"] = [body["at_s"][i] for i in kept]
    for each in body["series"]:
        each["values"] = [each["values"][i] for i in kept]
    route.fulfill(json=body)


if __name__ == "__main__":
    typer.run(main)
