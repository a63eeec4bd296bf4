"""Measures the console with a real API server and open pages, while all nodes report.

    python -m benchmarks.console_alone [--nodes 5000] [--pods 20000] [--report-every 60] [--pages 5]
        [--seconds 60] [--samples 100]

etcd and the API server hold nodes of 8 GPUs, their reports, and pods that each hold a part of a
GPU. The console is the real process with its own rights, and no extender runs. Each node writes
like an agent with default settings: a heartbeat every 30 s, and a report with new figures of all
its GPUs every ``--report-every`` seconds. Real agents write changes of SM activity at most once a
minute, and an idle node writes no report. The objects are put directly into etcd, because an API
server that also validates each write would need most of a core. The console receives them by its
watch. Prints the CPU of the console with and without open pages, and the time from a report to the
open GPU."""

import os
import random
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from playwright.sync_api import sync_playwright

from benchmarks.hotpath.machine import machine
from benchmarks.paced import PacedReporter
from benchmarks.page import Opened, follow, open_all, share, views_of
from benchmarks.scale import Part, parts
from benchmarks.scale_objects import (
    OBSERVED_AT,
    POD_BYTES,
    cluster_objects,
    fill,
    gpunode,
    heartbeats,
    lease,
    node_name,
)
from tests.controlplane import ControlPlane
from tests.debian import chromium
from tests.e2e.cluster import Cluster
from tests.e2e.nodes import GIB, SYSTEM_NAMESPACE

#: Number of the node whose GPU is open.
FOLLOWED = 42
PATIENCE_S = 300.0
#: Seconds between two heartbeats of an agent, which is its default.
HEARTBEAT_S = 30.0


class EtcdReporter(PacedReporter):
    """Puts reports with new figures into etcd."""

    def __init__(self, plane: ControlPlane, nodes: int, pods: int, rate: float) -> None:
        super().__init__(nodes, rate, batch_limit=100)
        self._plane, self._pods = plane, pods
        self._draw = random.Random(1)
        #: Number of a node -> ``observedAt`` of its latest report.
        self.observed: dict[int, str] = {}

    def report(self, numbers: list[int]) -> None:
        self._put([each for each in numbers if each != FOLLOWED], self._within_requests)

    def _within_requests(self, holders: int) -> int:
        """Return a use of a GPU that is within the requests of its pods."""
        return holders * self._draw.randrange(1, POD_BYTES // GIB) * GIB

    def send(self, used_bytes: int) -> None:
        """Report this use of each GPU of the followed node."""
        self._put([FOLLOWED], lambda _: used_bytes)

    def _put(self, numbers: list[int], used: Callable[[int], int]) -> None:
        if numbers:
            fill(self._plane, [self._object(number, used) for number in numbers])

    def _object(self, number: int, used: Callable[[int], int]) -> tuple[str, dict[str, Any]]:
        found = gpunode(number, range(number, self._pods, self._nodes))
        found["status"]["observedAt"] = self.observed[number] = datetime.now(UTC).isoformat()
        for device in found["status"]["devices"]:
            holders = [each for each in found["status"]["pods"] if each["device"] == device["uuid"]]
            device["used"] = used(len(holders))
            for each in holders:
                each["used"] = device["used"] // len(holders)
        return f"headroom.gpu/gpunodes/{node_name(number)}", found


class EtcdHeartbeats(PacedReporter):
    """Puts heartbeats into etcd. They confirm the latest report of each node."""

    def __init__(self, plane: ControlPlane, nodes: int, reporter: EtcdReporter) -> None:
        super().__init__(nodes, nodes / HEARTBEAT_S, batch_limit=100)
        self._plane, self._reporter = plane, reporter

    def report(self, numbers: list[int]) -> None:
        observed = self._reporter.observed
        leases = [
            (
                f"leases/{SYSTEM_NAMESPACE}/{node_name(each)}",
                lease(each, observed.get(each, OBSERVED_AT)),
            )
            for each in numbers
        ]
        if leases:
            fill(self._plane, leases)


def main(
    nodes: Annotated[int, typer.Option(help="Number of nodes, at least 100.", min=100)] = 5000,
    pods: Annotated[int, typer.Option(help="Pods that hold memory of a GPU.")] = 20_000,
    report_every: Annotated[float, typer.Option(help="Seconds between reports of a node.")] = 60.0,
    pages: Annotated[int, typer.Option(help="Open pages.", min=1)] = 5,
    seconds: Annotated[float, typer.Option(help="Seconds for which CPU is measured.")] = 60.0,
    samples: Annotated[int, typer.Option(help="Reports to time.")] = 100,
) -> None:
    typer.echo(f"{machine()}; load {os.getloadavg()[0]:.1f}")
    plane = ControlPlane()
    try:
        console = _console(plane, nodes, pods)
        reporter = EtcdReporter(plane, nodes, pods, nodes / report_every)
        beating = EtcdHeartbeats(plane, nodes, reporter)
        program, environment = chromium()
        with reporter.running(), beating.running(), sync_playwright() as playwright:
            time.sleep(5)
            without = share(console.pid, seconds)
            typer.echo(f"console, no page open: {without:.1f} % of a core")
            browser = playwright.chromium.launch(
                executable_path=program, env=dict(environment), args=["--no-sandbox"]
            )
            views = views_of(node_name(FOLLOWED))
            found = open_all(browser, Opened(console.url, views), pages)
            with_pages = share(console.pid, seconds)
            typer.echo(f"console, {pages} pages open: {with_pages:.1f} % of a core (goal 10 %)")
            follow(found[views[-1]], reporter.send, samples)
            typer.echo(
                f"writes late: {reporter.late}, {beating.late}; load {os.getloadavg()[0]:.1f}"
            )
            browser.close()
    finally:
        plane.stop()


def _console(plane: ControlPlane, nodes: int, pods: int) -> Part:
    """Start etcd, the API server with its objects, and the console."""
    plane.start()
    plane.install_crd()
    cluster = Cluster(plane, ())
    cluster.create()
    plane.kill("kube-apiserver")
    fill(plane, cluster_objects(nodes, pods, pods))
    fill(plane, heartbeats(nodes))
    plane.start_apiserver(PATIENCE_S)
    _, console, _ = parts(cluster)
    typer.echo(f"console ready in {console.start({'extenders': []}):.1f} s", file=sys.stdout)
    return console


if __name__ == "__main__":
    typer.run(main)
