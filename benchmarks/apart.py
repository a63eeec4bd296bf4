"""What kube-scheduler's calls take while others read and others create pods, beside an echo.

    python -m benchmarks.apart [--nodes 1000] [--pods 20000] [--gpu-pods 4000] [--seconds 15]
        [--together]

A real API server holds the cluster (``benchmarks.scale``). Extender, console, webhook, an echo of
the same bodies and the load each have CPU quotas of their own (cgroups, so it needs root): a
process that takes all that it can get takes it from itself. One caller asks filter and the echo in
turn, as kube-scheduler does: one call after the other. Rounds:

* idle;
* read: three readers of the console without a pause: all nodes, the metrics, a what-if;
* flooded: eight connections that send reviews of 100 KiB to the webhook without a pause.

``--together`` runs extender and console in one process, with both quotas, as before they were
apart. Goal: the p99 of filter grows by no more than 1.5 times what that of the idle echo grows by,
in the same round.
"""

import asyncio
import contextlib
import json
import multiprocessing
import ssl
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import typer
import urllib3
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from benchmarks.agent import vitals
from benchmarks.hotpath.bodies import pod_as_sent
from benchmarks.hotpath.machine import machine
from benchmarks.scale import cluster_objects, fill, heartbeats, node_name
from tests.admission.reviews import manifest, review
from tests.admission.server import start_webhook
from tests.certificates import Authority
from tests.controlplane import ControlPlane, free_ports
from tests.e2e.cluster import Cluster
from tests.waiting import until

CGROUPS = Path("/sys/fs/cgroup/cpu")
#: Cores of each process, and of the load.
QUOTAS = {"extender": 0.5, "console": 0.4, "webhook": 0.3, "echo": 0.3, "load": 0.3}
MOST_RATIO = 1.5
_PATIENCE_S = 300.0
_PAUSE_S = 0.02


@contextlib.contextmanager
def quotas() -> Iterator[Callable[[str, int], None]]:
    """Puts processes into groups of these names, each with its quota."""
    made = []
    try:
        for name, cores in QUOTAS.items():
            group = CGROUPS / f"headroom-{name}"
            group.mkdir(exist_ok=True)
            made.append(group)
            period_us = int((group / "cpu.cfs_period_us").read_text())
            (group / "cpu.cfs_quota_us").write_text(str(int(cores * period_us)))

        def put(name: str, pid: int) -> None:
            (CGROUPS / f"headroom-{name}" / "cgroup.procs").write_text(str(pid))

        yield put
    finally:
        for group in made:
            for pid in (group / "cgroup.procs").read_text().split():
                (CGROUPS / "cgroup.procs").write_text(pid)
            group.rmdir()


def echo(port: int) -> None:
    async def answer(request: Request) -> Response:
        return Response(await request.body(), media_type="application/json")

    app = Starlette(routes=[Route("/echo", answer, methods=["POST"])])
    uvicorn.run(app, port=port, log_level="error", access_log=False)


def readers(url: str) -> None:
    """Read without a pause, each view in turn with the others."""

    async def read(method: str, path: str, body: Any) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
            while True:
                await client.request(method, path, json=body)

    async def all_of_them() -> None:
        what_if = {"pods": [{"vram": "20Gi", "count": 50}]}
        views = [
            ("GET", "/v1/nodes", None),
            ("GET", "/metrics", None),
            ("POST", "/v1/whatif", what_if),
        ]
        await asyncio.gather(*(read(*view) for view in views))

    asyncio.run(all_of_them())


def flood(url: str, connections: int) -> None:
    body = msgspec.json.encode(review(manifest("8Gi", annotations={"team/notes": "x" * 100_000})))

    async def send() -> None:
        context = ssl._create_unverified_context()
        async with httpx.AsyncClient(verify=context, timeout=60, trust_env=False) as client:
            while True:
                await client.post(f"{url}/mutate", content=body)

    async def all_of_them() -> None:
        await asyncio.gather(*(send() for _ in range(connections)))

    asyncio.run(all_of_them())


@dataclass(frozen=True, slots=True)
class Spread:
    p50_ms: float
    p99_ms: float
    calls: int


def spread(took_s: list[float]) -> Spread:
    ordered = sorted(took_s)
    p99_s = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return Spread(1e3 * statistics.median(ordered), 1e3 * p99_s, len(ordered))


def asked(verbs: str, echo_url: str, nodes: int, seconds: float) -> dict[str, Spread]:
    """Filter and the echo of the same body, one after the other."""
    http = urllib3.PoolManager(retries=False, timeout=60.0)
    names = [node_name(index) for index in range(nodes)]
    took: dict[str, list[float]] = {"filter": [], "echo": []}
    until_s, number = time.monotonic() + seconds, 0
    while time.monotonic() < until_s:
        number += 1
        sent = pod_as_sent(f"asked-{number}", "8Gi")
        body = msgspec.json.encode({"Pod": sent, "Nodes": None, "NodeNames": names})
        for name, url in (("filter", f"{verbs}/filter"), ("echo", f"{echo_url}/echo")):
            began_s = time.perf_counter()
            answer = http.request("POST", url, body=body)
            took[name].append(time.perf_counter() - began_s)
            assert answer.status == 200, answer.data
        time.sleep(_PAUSE_S)
    return {name: spread(each) for name, each in took.items()}


@contextlib.contextmanager
def load(put: Callable[[str, int], None], what: Callable[..., None], *args: Any) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=what, args=args, daemon=True)
    process.start()
    try:
        assert process.pid is not None
        put("load", process.pid)
        time.sleep(3.0)  # imports, connections
        yield
    finally:
        process.kill()
        process.join()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", trust_env=False, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def main(
    nodes: Annotated[int, typer.Option(help="Nodes of 8 GPUs.")] = 1_000,
    pods: Annotated[int, typer.Option(help="Pods in all.")] = 20_000,
    gpu_pods: Annotated[int, typer.Option(help="Those of them that hold a GPU.")] = 4_000,
    seconds: Annotated[float, typer.Option(help="Of each round.")] = 15.0,
    together: Annotated[bool, typer.Option("--together", help="One process for both.")] = False,
) -> None:
    """Print p50 and p99 of filter and of the echo in each round, and what each process holds."""
    typer.echo(f"{machine()}; {nodes} nodes, {pods} pods; quotas {json.dumps(QUOTAS)}")
    plane = ControlPlane()
    with contextlib.ExitStack() as undo:
        undo.callback(plane.stop)
        plane.start()
        plane.install_crd()
        cluster = Cluster(plane, ())
        cluster.create()
        plane.kill("kube-apiserver")
        fill(plane, cluster_objects(nodes, pods, gpu_pods))
        fill(plane, heartbeats(nodes))
        plane.start_apiserver(_PATIENCE_S)
        put = undo.enter_context(quotas())
        verbs, journal, debug, echoes = free_ports(4)
        config = plane.folder / "console.yaml"
        config.write_text(f"extenders: [127.0.0.1:{journal}]\n")
        second = debug if together else journal
        ports = ("--verbs-port", str(verbs), "--debug-port", str(second), "--debug-open")
        environment = {"KUBECONFIG": str(plane.kubeconfig("extender-of-the-tests"))}
        plane.fork(
            "extender", "extender", "serve" if together else "extender", *ports, env=environment
        )
        if not together:
            arguments = ("--config", str(config), "--debug-port", str(debug), "--debug-open")
            environment = {"KUBECONFIG": str(plane.kubeconfig("console-of-the-tests"))}
            plane.fork("console", "extender", "console", *arguments, env=environment)
        webhook = start_webhook(
            plane, "webhook", Authority(plane.folder, "webhook-ca"), plane.kubeconfig()
        )
        console_url, extender_url = f"http://127.0.0.1:{debug}", f"http://127.0.0.1:{second}"
        for url in {console_url, extender_url}:
            until(lambda url=url: is_ready(url), f"{url} is ready", _PATIENCE_S)
        parts = ["extender", "webhook"] if together else ["extender", "console", "webhook"]
        for part in parts:
            put(part, plane.pid(part))
        if together:  # both quotas
            group = CGROUPS / "headroom-extender"
            both = QUOTAS["extender"] + QUOTAS["console"]
            period_us = int((group / "cpu.cfs_period_us").read_text())
            (group / "cpu.cfs_quota_us").write_text(str(int(both * period_us)))
        server = multiprocessing.get_context("spawn").Process(
            target=echo, args=(echoes,), daemon=True
        )
        server.start()
        undo.callback(server.kill)
        assert server.pid is not None
        put("echo", server.pid)
        echo_url = f"http://127.0.0.1:{echoes}"
        until(lambda: _echoes(echo_url), "the echo answers")
        fill(plane, heartbeats(nodes))
        asking = f"http://127.0.0.1:{verbs}", echo_url, nodes, seconds
        asked(*asking[:3], 3.0)
        rounds = {"idle": asked(*asking)}
        with load(put, readers, console_url):
            rounds["read"] = asked(*asking)
        with load(put, flood, webhook.url, 8):
            rounds["flooded"] = asked(*asking)
        for name, found in rounds.items():
            grown = {
                each: found[each].p99_ms / rounds["idle"][each].p99_ms
                for each in ("filter", "echo")
            }
            ratio = grown["filter"] / grown["echo"]
            goal = f"goal {MOST_RATIO}: {'met' if ratio <= MOST_RATIO else 'NOT MET'}"
            filtered, echoed = found["filter"], found["echo"]
            typer.echo(
                f"{name:<8} filter p50 {filtered.p50_ms:6.2f} p99 {filtered.p99_ms:7.2f} ms; echo"
                f" p50 {echoed.p50_ms:5.2f} p99 {echoed.p99_ms:6.2f} ms; {filtered.calls} calls;"
                f" p99 grew {grown['filter']:.2f} and {grown['echo']:.2f} times, ratio {ratio:.2f},"
                f" {goal}"
            )
        for part in parts:
            now = vitals(plane.pid(part))
            held = f"{now.resident_mib:6.0f} MiB, peak {now.peak_mib:.0f}"
            typer.echo(f"{part:<9}{held}; {now.threads} threads")


def _echoes(url: str) -> bool:
    try:
        return httpx.post(f"{url}/echo", content=b"x", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    typer.run(main)
