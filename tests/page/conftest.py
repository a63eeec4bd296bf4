"""Runs a real browser and an embedded server whose fleet is full and has faults."""

import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Error,
    Page,
    Request,
    expect,
    sync_playwright,
)

from headroom.contract.gpunode import Device, GPUNodeStatus, Plugin, PodUse, Replicas
from tests.debian import Unavailable, chromium
from tests.processes import starts_processes
from tests.serving import Server, serving
from tests.waiting import PATIENCE_S

GIB = 1 << 30
#: A fleet with more nodes than fit on one page of the table.
FLEET = """\
nodes:
  - {name: l4, count: 60, gpus: 2, memory: 24Gi, model: L4, sharing: time-slicing, replicas: 4}
  - {name: h100, gpus: 8, memory: 80Gi, model: H100, sharing: time-slicing, replicas: 4}
"""

PLUGIN = Plugin(allocation_policy="distributed", device_list_strategy="envvar")

#: Finds elements whose own text has a contrast below 4.5, the minimum of WCAG AA.
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


# While this browser runs, other tests in the process cannot run an event loop.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        program, environment = chromium("chromium-headless-shell")
    except Unavailable as err:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no Chromium can be had here: {err}")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=program, env=dict(environment), args=["--no-sandbox"]
        )
        yield started
        started.close()


@pytest.fixture(scope="module")
@starts_processes
def server() -> Iterator[Server]:
    with serving(FLEET) as started:
        # kube-scheduler offers every class of GPUs, or prices would prefer the class that it omits.
        ask(started, "runs", "7Gi", ["l4-0000", "h100"])
        place(started, "runs", "7Gi", "l4-0000")
        ask(started, "large", "90Gi", ["l4-0000", "l4-0001", "h100"])
        outsider = {
            "used_bytes": 20 * GIB,
            "unattributed_bytes": 20 * GIB,
            "replicas": Replicas(free=4),
        }
        report(started, "l4-0059", outsider, {"healthy": False, "health_reason": "XID 79"})
        yield started


class Looked:
    """A page, with the errors that the browser reports and its requests to other hosts."""

    def __init__(self, page: Page, address: str) -> None:
        self.page, self.address = page, address
        self.complaints: list[str] = []
        #: Part of the error messages that a test causes on purpose.
        self.expected: str | None = None
        self.elsewhere: list[str] = []

    def heard(self, message: ConsoleMessage) -> None:
        text = message.text
        if message.type in ("error", "warning") and not (self.expected and self.expected in text):
            self.complaints.append(text)

    def failed(self, error: Error) -> None:
        self.complaints.append(str(error))

    def asked(self, request: Request) -> None:
        if not request.url.startswith(self.address):
            self.elsewhere.append(request.url)

    def open(self, where: str) -> Page:
        self.page.goto(f"{self.address}/#{where}")
        return self.page


# All tests of a module share this page, because a new context takes a second of CPU. The page
# stores nothing in the browser.
@pytest.fixture(scope="module")
def window(browser: Browser) -> Page:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_S * 1000)
    return page


@pytest.fixture
def readings(window: Page, server: Server) -> Iterator[Looked]:
    expect.set_options(timeout=PATIENCE_S * 1000)
    window.set_viewport_size({"width": 1280, "height": 900})
    window.emulate_media(color_scheme="light", reduced_motion="no-preference")
    found = Looked(window, server.debug)
    heard = {"console": found.heard, "pageerror": found.failed, "request": found.asked}
    for event, listener in heard.items():
        window.on(event, listener)
    yield found
    # Ignore errors, because a route of the test may be answering a refresh at this moment.
    window.unroute_all(behavior="ignoreErrors")
    for event, listener in heard.items():
        window.remove_listener(event, listener)
    window.goto("about:blank")
    assert found.elsewhere == []
    assert found.complaints == []


def pod(name: str, vram: str, gpus: int = 1) -> dict[str, Any]:
    container = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    metadata = {
        "namespace": "team-a",
        "name": name,
        "uid": f"uid-{name}",
        "annotations": {"headroom.gpu/vram": vram},
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    return {"metadata": metadata, "spec": {"containers": [container]}}


def ask(server: Server, name: str, vram: str, nodes: list[str], gpus: int = 1) -> None:
    assert server.post("/filter", {"Pod": pod(name, vram, gpus), "NodeNames": nodes}).status == 200


def place(server: Server, name: str, vram: str, node: str, gpus: int = 1) -> None:
    ask(server, name, vram, [node], gpus)
    uid = f"uid-{name}"
    binding = {"PodName": name, "PodNamespace": "team-a", "PodUID": uid, "Node": node}
    assert server.post("/bind", binding).json() == {"Error": ""}


def report(
    server: Server,
    node: str,
    *devices: dict[str, Any],
    pods: Sequence[PodUse] = (),
    plugin: Plugin = PLUGIN,
) -> None:
    """Let the agent of a node report these L4 GPUs, with defaults for the other fields."""
    status = GPUNodeStatus(
        observed_at=datetime.now(UTC).isoformat(),
        plugin=plugin,
        devices=[
            Device(
                **{
                    "uuid": f"GPU-{node}-{index}",
                    "index": index,
                    "model": "L4",
                    "memory_bytes": 24 * GIB,
                    "reserved_bytes": 0,
                    "used_bytes": 0,
                    "unattributed_bytes": 0,
                    "resource": "nvidia.com/gpu",
                    "sharing": "time-slicing",
                    "replicas": Replicas(free=4),
                    **changed,
                }
            )
            for index, changed in enumerate(devices)
        ],
        pods=list(pods),
    )
    body = [{"node": node, "status": msgspec.to_builtins(status)}]
    assert server.debug_post("/embedded/v1/reports", body).status == 204
