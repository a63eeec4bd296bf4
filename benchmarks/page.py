"""Measures the page in a real browser while a large fleet reports.

    python -m benchmarks.page [--nodes 5000] [--rate 167] [--pages 5] [--seconds 60] [--samples 100]

The embedded server has nodes with 8 GPUs, of which ``--rate`` report new figures each second. 5,000
idle nodes write 167 times a second (docs/design/api-load.md). Chromium runs on the same machine.
Prints the time to the first paint and to the first figures, the time from an input to its paint
with the CPU that the page's main thread uses for it, the time from a report to the open page, and
the CPU of the server with and without open pages. The server includes an extender, so the
difference is the cost of the pages.
"""

import os
import random
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from playwright.sync_api import Browser, CDPSession, Page, expect, sync_playwright

from benchmarks.hotpath.machine import machine
from benchmarks.paced import PacedReporter
from headroom.contract.gpunode import Device, GPUNodeStatus, Plugin, Replicas
from tests.debian import chromium
from tests.serving import Server, serving

GIB = 1 << 30
GPUS = 8
FOLLOWED = "h100-0042"
#: View -> an expression that is true when its figures are shown.
FIGURES = {
    "/overview": "document.querySelectorAll('.list').length === 3 && "
    "![...document.querySelectorAll('.list > div')].some(each => !each.textContent)",
    "/fleet": "document.querySelector('#found')?.textContent.includes('GPUs on')",
    "/nodes": "document.querySelectorAll('#nodes details').length > 0",
    "/teams": "document.querySelector('#view table, #view p')",
}
OPEN_GPU = "document.querySelector('#detail .badges')"
#: Defines a function whose result settles after the next paint.
PAINT = """window.painted = async () => {
  let done;
  const after = { then: call => { done = call; } };
  requestAnimationFrame(() => setTimeout(() => done()));
  await after;
}"""
PAINTED = """async input => {
  const began = performance.now();
  new Function(input)();
  await window.painted();
  return performance.now() - began;
}"""
INPUTS = {
    "colour": "const s = document.getElementById('colour'); s.selectedIndex = (s.selectedIndex + 1)"
    " % s.options.length; s.dispatchEvent(new Event('change'))",
    "search": "const s = document.getElementById('find'); s.value = s.value ? '' : 'h100-04';"
    " s.dispatchEvent(new Event('input'))",
    "zoom": "const [out, big] = document.querySelectorAll('.zoom button');"
    " window.turn = !window.turn; (window.turn ? big : out).click()",
    "key": "document.querySelector('.map').dispatchEvent("
    "new KeyboardEvent('keydown', {key: 'ArrowRight'}))",
}
#: Records when a text first appears in the open detail.
OBSERVED = """() => {
  window.seen = {};
  new MutationObserver(() => {
    const text = document.querySelector('#detail .badges')?.textContent ?? '';
    const found = /([\\d.]+) GiB in use/.exec(text);
    if (found) window.seen[found[1]] ??= Date.now();
  }).observe(document.querySelector('#detail'), {childList: true, subtree: true});
}"""


class Opened(NamedTuple):
    """A console, and the views that are opened in it."""

    debug: str
    views: tuple[str, ...]


def views_of(node: str) -> tuple[str, ...]:
    """Return the views that are opened. The last shows a GPU of the node."""
    return (*FIGURES, f"/fleet/{node}/3")


class Reporter(PacedReporter):
    """Reports new figures to the embedded server."""

    def __init__(self, server: Server, nodes: int, rate: float) -> None:
        super().__init__(nodes, rate, batch_limit=500)
        self._server = server
        self._draw = random.Random(1)

    def report(self, numbers: list[int]) -> None:
        names = [f"h100-{number:04d}" for number in numbers]
        names = [name for name in names if name != FOLLOWED]
        self.send(names, lambda: self._draw.randrange(70) * GIB)

    def follow(self, used_bytes: int) -> None:
        self.send([FOLLOWED], lambda: used_bytes)

    def send(self, names: list[str], used: Any) -> None:
        body = [{"node": name, "status": msgspec.to_builtins(status(name, used))} for name in names]
        assert self._server.debug_post("/embedded/v1/reports", body).status == 204


def status(node: str, used: Any) -> GPUNodeStatus:
    devices = [
        Device(
            uuid=f"GPU-{node}-{index}",
            index=index,
            model="H100",
            memory_bytes=80 * GIB,
            reserved_bytes=0,
            used_bytes=(found := used()),
            unattributed_bytes=found,
            resource="nvidia.com/gpu",
            sharing="time-slicing",
            replicas=Replicas(free=4),
        )
        for index in range(GPUS)
    ]
    plugin = Plugin(allocation_policy="distributed", device_list_strategy="envvar")
    return GPUNodeStatus(observed_at=datetime.now(UTC).isoformat(), plugin=plugin, devices=devices)


def quantiles(values: list[float], unit: str) -> str:
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return f"p50 {ordered[len(ordered) // 2]:,.0f} {unit}, p99 {p99:,.0f} {unit} of {len(ordered)}"


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def page_cpu_ms(session: CDPSession) -> float:
    """Return the CPU milliseconds that the main thread of a page has used for inputs and
    updates."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return 1000 * next(float(each["value"]) for each in metrics if each["name"] == "TaskDuration")


def share(pid: int, seconds: float) -> float:
    """Return the percentage of one core that a process uses in the next ``seconds``."""
    began_s, before_s = time.monotonic(), cpu_s(pid)
    time.sleep(seconds)
    return 100 * (cpu_s(pid) - before_s) / (time.monotonic() - began_s)


def opened(browser: Browser, debug: str, view: str) -> tuple[Page, float, float]:
    """Open a view in a new page. Return it, and the ms to its first paint and to its figures."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}, bypass_csp=True).new_page()
    page.goto(f"{debug}/#{view}", wait_until="commit")
    page.wait_for_function(FIGURES.get(view, OPEN_GPU), polling=10, timeout=60_000)
    figures = float(page.evaluate("performance.now()"))
    page.wait_for_function("performance.getEntriesByType('paint').length > 0")
    paint = float(page.evaluate("performance.getEntriesByType('paint').at(-1).startTime"))
    return page, paint, figures


def main(
    nodes: Annotated[int, typer.Option(help="Number of nodes, at least 100.", min=100)] = 5000,
    rate: Annotated[float, typer.Option(help="Reports a second.")] = 167.0,
    pages: Annotated[int, typer.Option(help="Open pages.", min=1)] = 5,
    seconds: Annotated[float, typer.Option(help="Seconds for which CPU is measured.")] = 60.0,
    samples: Annotated[int, typer.Option(help="Inputs and reports to time.")] = 100,
) -> None:
    print(f"{machine()}; load {os.getloadavg()[0]:.1f}")  # noqa: T201
    fleet = f"nodes: [{{name: h100, count: {nodes}, gpus: 8, memory: 80Gi, model: H100, "
    fleet += "sharing: time-slicing, replicas: 4}]"
    program, environment = chromium()
    with serving(fleet) as server, sync_playwright() as playwright:
        pid = pid_of(server)
        reporter = Reporter(server, nodes, rate)
        browser = playwright.chromium.launch(
            executable_path=program, env=dict(environment), args=["--no-sandbox"]
        )
        with reporter.running():
            # The first report of a node changes more than later reports do.
            time.sleep(max(5, nodes / rate))
            without = share(pid, seconds)
            print(f"server, no page open: {without:.1f} % of a core")  # noqa: T201
            views = views_of(FOLLOWED)
            open_pages = open_all(browser, Opened(server.debug, views), pages)
            share_with = share(pid, seconds)
            print(  # noqa: T201
                f"server, {pages} pages open: {share_with:.1f} % of a core, "
                f"{share_with - without:.1f} more"
            )
            _interact(open_pages["/fleet"], samples)
            follow(open_pages[views[-1]], reporter.follow, samples)
            print(f"reports late: {reporter.late}; load {os.getloadavg()[0]:.1f}")  # noqa: T201
        browser.close()


def open_all(browser: Browser, where: Opened, pages: int) -> dict[str, Page]:
    """Open each view at least once. Return view -> its page."""
    found: dict[str, Page] = {}
    for number in range(max(pages, len(where.views))):
        view = where.views[number % len(where.views)]
        page, paint_ms, figures_ms = opened(browser, where.debug, view)
        found.setdefault(view, page)
        print(f"{view}: first paint {paint_ms:.0f} ms, figures {figures_ms:.0f} ms")  # noqa: T201
    return found


def _interact(page: Page, samples: int) -> None:
    page.bring_to_front()
    page.locator(".map").focus()
    page.evaluate(PAINT)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    for name, what in INPUTS.items():
        before_ms = page_cpu_ms(session)
        took = [float(page.evaluate(PAINTED, what)) for _ in range(samples)]
        each_ms = (page_cpu_ms(session) - before_ms) / samples
        print(f"{name}, input to paint: {quantiles(took, 'ms')}, {each_ms:.0f} ms of CPU")  # noqa: T201


def follow(page: Page, send: Callable[[int], None], samples: int) -> None:
    """Print the time from a report to the open detail, which stays open.

    ``send`` reports the use of the GPU in bytes.
    """
    page.bring_to_front()
    page.evaluate(OBSERVED)
    expect(page.locator("#live")).to_contain_text("live")
    took = []
    for number in range(samples):
        amount = 1 + number / 2
        send(int(amount * GIB))
        received_ms = 1000 * time.time()
        text = f"{amount:.1f}"
        seen = page.wait_for_function(f"window.seen['{text}']", polling=20, timeout=20_000)
        took.append(max(0.0, float(seen.json_value()) - received_ms))
        time.sleep(random.uniform(0, 1))
    print(f"report to open page: {quantiles(took, 'ms')}")  # noqa: T201
    assert page.locator("#detail").is_visible()


def pid_of(server: Server) -> int:
    """Return the id of the process that listens on the server's port."""
    port = int(re.search(r":(\d+)$", server.debug)[1])  # type: ignore[index]
    inode = next(
        line.split()[9]
        for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
        if int(line.split()[1].partition(":")[2], 16) == port and line.split()[3] == "0A"
    )
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if link.readlink().name == f"socket:[{inode}]":
                return int(link.parts[2])
        except OSError:  # the process has ended, or belongs to another user
            continue
    raise RuntimeError("the server's process was not found")


if __name__ == "__main__":
    typer.run(main)
