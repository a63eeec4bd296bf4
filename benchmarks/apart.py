"""Measures kube-scheduler's calls while agents report, the console is read, and pods are created.

    python -m benchmarks.apart [--nodes 5000] [--pods-per-device 2] [--seconds 15] [--rounds 1]
        [--json] [--without-quotas]

Extender, console and webhook are the real processes. Their API server is simulated: it lists the
fleet, sends watch events for the reports of agents, and accepts each write (``hotpath.feeder``).
Each process has its own CPU quota, as containers have (a cgroup, so it needs root). Without quotas,
two cores would hide that one process uses more. One client calls filter, prioritize and bind for
one pod after the other, as kube-scheduler does. After filter and after prioritize, it sends the
same body to an *echo server*, which is an otherwise idle process on the same machine. After bind,
it makes the two writes of a bind itself, a PATCH of the GPUNode and a Binding, as the echo of bind.
The phases are:

* idle: no other load;
* growing: each agent reports every 5 s, the maximum rate while memory use grows, with heartbeats
  and changes of pods;
* freeing: each agent reports every second, the maximum rate while memory is freed;
* bursts: all agents report at once, every 5 s;
* read: the console's views, metrics, a what-if and all nodes are read without a pause, and the
  extender is scraped every second;
* flooded: eight connections send reviews of 100 KiB to the webhook without a pause;
* everything: growing, read and flooded at once.

The goal is that the p99 of a verb grows from idle to any phase by at most 1.5 times as much as the
p99 of its echo. The results also show how often the event loop stalled for more than 5 ms, in the
extender and in the echo server.
"""

import asyncio
import contextlib
import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from benchmarks.apart_results import (
    IDLE,
    LATE_S,
    PARTS,
    PAUSE_S,
    PHASES,
    SCHEMA,
    Phase,
    Results,
    Samples,
    Stalls,
    finding,
    show,
)
from benchmarks.hotpath.bodies import SEED, Bodies, bind_of
from benchmarks.hotpath.calling import Caller
from benchmarks.hotpath.feeder import GPUNODES, Order, feed
from benchmarks.hotpath.machine import cores, processor, versions
from benchmarks.vitals import vitals
from headroom.runtime.telemetry import sample_lag
from tests.admission.server import start_webhook
from tests.certificates import Authority
from tests.processes import Processes, free_ports
from tests.waiting import until

#: Cores of each process, of all readers and senders together, and of the API server.
QUOTAS = {"extender": 0.8, "console": 0.3, "webhook": 0.3, "echo": 0.2, "load": 0.2, "api": 0.2}
_CGROUPS = Path("/sys/fs/cgroup")
#: Period of a CPU quota, as the kubelet sets it.
_PERIOD_US = 100_000
_PATIENCE_S = 300.0
_BURST_EVERY_S = 5.0


Put = Callable[[str, int], None]


@contextlib.contextmanager
def quotas() -> Iterator[Put]:
    """Yield a function that puts processes into groups with these names, each with its quota. Works
    with both versions of cgroups."""
    first = _CGROUPS / "cpu"
    root = first if first.is_dir() else _CGROUPS
    made: list[Path] = []
    try:
        for name, share in QUOTAS.items():
            group = root / f"headroom-{name}"
            group.mkdir(exist_ok=True)
            made.append(group)
            quota_us = int(share * _PERIOD_US)
            if root is first:
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota_us))
            else:
                (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")

        def put(name: str, pid: int) -> None:
            (root / f"headroom-{name}" / "cgroup.procs").write_text(str(pid))

        yield put
    finally:
        for group in made:
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (root / "cgroup.procs").write_text(pid)
            group.rmdir()


def echo(port: int) -> None:
    """Serve the process with which every call is compared. It counts its own stalls."""
    stalls = Stalls()

    async def answer(request: Request) -> Response:
        body = msgspec.json.decode(await request.body())
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def reported(_: Request) -> Response:
        return Response(msgspec.json.encode(stalls))

    def observe(late_s: float) -> None:
        stalls.samples += 1
        stalls.late += late_s > LATE_S

    @contextlib.asynccontextmanager
    async def sampled(_: Starlette) -> Any:
        task = asyncio.create_task(sample_lag(observe))
        yield
        task.cancel()

    routes = [Route("/echo", answer, methods=["POST"]), Route("/stalls", reported)]
    app = Starlette(routes=routes, lifespan=sampled)
    uvicorn.run(app, port=port, log_level="error", access_log=False)


def scrape(port: int) -> None:
    while True:
        with contextlib.closing(Caller(port)) as caller:
            caller.get("metrics")
        time.sleep(1.0)


class _Site:
    """The three processes, their API server and the echo server."""

    def __init__(self, processes: Processes, nodes: int, pods_per_device: int, put: Put) -> None:
        self.processes, self.put = processes, put
        self._undo = contextlib.ExitStack()
        self.verbs, self.journal, self.console, self.echo = free_ports(4)
        ours, theirs = multiprocessing.Pipe()
        self.orders: Connection = ours
        api = self._child(feed, nodes, pods_per_device, theirs)
        self.api: int = ours.recv()
        self._kubeconfig = self._config(f"http://127.0.0.1:{self.api}")
        # Apply quotas only when everything is ready, because benchmarks.scale measures the start.
        self._start()
        put("api", api)
        put("echo", self._child(echo, self.echo))
        until(lambda: _answers(self.echo, "stalls"), "the echo answers")
        for part in PARTS:
            put(part, processes.pid(part))

    def close(self) -> None:
        self._undo.close()

    def _child(self, target: Any, *args: Any) -> int:
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=target, args=args, daemon=True)
        child.start()
        self._undo.callback(child.join)
        self._undo.callback(child.kill)
        assert child.pid is not None
        return child.pid

    def _config(self, server: str) -> Path:
        file = self.processes.folder / "kubeconfig"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "current-context": "c",
        }
        file.write_text(yaml.safe_dump(content), encoding="utf-8")
        return file

    def _start(self) -> None:
        processes, env = self.processes, {"KUBECONFIG": str(self._kubeconfig)}
        ports = "--verbs-port", str(self.verbs), "--debug-port", str(self.journal)
        processes.fork(
            "extender", "headroom", "extender", *ports, "--insecure-verbs", "--debug-open", env=env
        )
        config = processes.folder / "console.yaml"
        config.write_text(f"extenders: [127.0.0.1:{self.journal}]\n")
        port = "--debug-port", str(self.console), "--debug-open", "--config", str(config)
        processes.fork("console", "headroom", "console", *port, env=env)
        authority = Authority(processes.folder, "webhook-ca")
        self.webhook = start_webhook(processes, "webhook", authority, self._kubeconfig)
        for at in (self.journal, self.console):
            until(lambda at=at: self._is_ready(at), "all processes are ready", _PATIENCE_S)

    def _is_ready(self, port: int) -> bool:
        self.processes.raise_if_ended()
        return _answers(port, "readyz", b"ok\n")

    def order(self, order: Order) -> None:
        self.orders.send(order)
        self.orders.recv()

    @contextlib.contextmanager
    def load(self, phase: Phase, nodes: int) -> Iterator[None]:
        urls = [f"http://127.0.0.1:{self.console}"] * phase.read + [self.webhook.url] * (
            phase.flooded
        )
        with contextlib.ExitStack() as undo:
            self.order(Order(phase.reports_per_s * nodes, others=phase is not IDLE))
            # Wait until all events are sent, so that the next phase starts without a backlog.
            undo.callback(self.order, Order(drain=True))
            for number, url in enumerate(urls):
                name = f"load-{number}"
                self.processes.fork(name, "tests.flood", url, env={})
                undo.callback(self.processes.kill, name)
                self.put("load", self.processes.pid(name))
            if phase.read:
                context = multiprocessing.get_context("spawn")
                scraper = context.Process(target=scrape, args=(self.journal,), daemon=True)
                scraper.start()
                undo.callback(scraper.join)
                undo.callback(scraper.kill)
            yield

    def stalls(self) -> tuple[Stalls, Stalls]:
        """Return the stalls of the extender and of the echo server since they began."""
        with contextlib.closing(Caller(self.journal)) as caller:
            text = caller.get("metrics")[0].decode()
        found = re.findall(r'^headroom_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', text, re.M)
        at_most = {le: int(float(count)) for le, count in found}
        extender = Stalls(at_most["+Inf"], at_most["+Inf"] - at_most[str(LATE_S)])
        with contextlib.closing(Caller(self.echo)) as caller:
            return extender, msgspec.json.decode(caller.get("stalls")[0], type=Stalls)


def _answers(port: int, path: str, expected: bytes = b"") -> bool:
    with contextlib.suppress(OSError), contextlib.closing(Caller(port)) as caller:
        return expected in caller.get(path)[0]
    return False


class _Play:
    def __init__(self, site: _Site, nodes: int) -> None:
        self._site, self._nodes = site, nodes
        self._verbs, self._echo, self._api = map(Caller, (site.verbs, site.echo, site.api))
        self._bodies = Bodies(nodes, ("1Gi", "2Gi", "4Gi", "8Gi", "5%"))

    def close(self) -> None:
        for caller in (self._verbs, self._echo, self._api):
            caller.close()

    def play(self, phase: Phase, seconds: float, samples: Samples) -> None:
        site = self._site
        pids = {part: site.processes.pid(part) for part in PARTS}
        with site.load(phase, self._nodes):
            self._ask(min(3.0, seconds), phase, Samples())  # wait until the load has begun
            before, stalls = {part: vitals(pid) for part, pid in pids.items()}, site.stalls()
            self._ask(seconds, phase, samples)
            for part, pid in pids.items():
                now = vitals(pid)
                samples.cpu_s[part] = samples.cpu_s.get(part, 0.0) + now.cpu_s - before[part].cpu_s
                samples.resident_mib[part] = now.resident_mib
            samples.took_s += time.monotonic() - before["extender"].at_s
            extender, echoed = (
                now.since(then) for now, then in zip(site.stalls(), stalls, strict=True)
            )
        for total, part in ((samples.stalls, extender), (samples.echo_stalls, echoed)):
            total.samples += part.samples
            total.late += part.late

    def _ask(self, seconds: float, phase: Phase, samples: Samples) -> None:
        burst_at_s = time.monotonic()
        until_s = burst_at_s + seconds
        while time.monotonic() < until_s:
            if phase.bursts and time.monotonic() >= burst_at_s:
                burst_at_s += _BURST_EVERY_S
                self._site.order(Order(burst=True, others=True))
            body = self._bodies.another()
            answer = self._call("filter", body, samples)
            passed = self._bodies.of_those_that_passed(body, answer)
            if len(passed) < len(body) / 2:
                raise RuntimeError(f"the fleet takes no pods: {answer[-400:]!r}")
            ranked = msgspec.json.decode(self._call("prioritize", passed, samples))
            args = bind_of(body, ranked[0]["Host"])
            bound = self._call("bind", args, samples)
            if error := msgspec.json.decode(bound).get("Error"):
                raise RuntimeError(f"a pod is not bound: {error}")
            time.sleep(PAUSE_S)

    def _call(self, verb: str, body: bytes, samples: Samples) -> bytes:
        answer, took_ns = self._verbs.post(verb, body)
        samples.verbs[verb].append(took_ns)
        echoed_ns = self._write(body) if verb == "bind" else self._echo.post("echo", body)[1]
        samples.echoes[verb].append(echoed_ns)
        return answer

    def _write(self, args: bytes) -> int:
        """Make the two writes that every bind needs. Return their duration in nanoseconds."""
        asked = msgspec.json.decode(args)
        gpunode = f"{GPUNODES[1:]}/{asked['Node']}"
        binding = f"api/v1/namespaces/default/pods/{asked['PodName']}/binding"
        return self._api.patch(gpunode, args)[1] + self._api.post(binding, args)[1]

    def burst(self) -> float:
        """Return the seconds from the order until the console shows the last node that reports."""
        began_s, before = time.monotonic(), self._shown()
        self._site.order(Order(burst=True))
        until(lambda: self._shown() != before, "the console shows the burst", _PATIENCE_S)
        return time.monotonic() - began_s

    def _shown(self) -> str:
        with contextlib.closing(Caller(self._site.console)) as console:
            body = console.get(f"v1/nodes/gpu-a100-{self._nodes - 1:04d}")[0]
        shown: str = msgspec.json.decode(body)["node"]["observed_at"]
        return shown


def results(
    nodes: int, pods_per_device: int, seconds: float, rounds: int, with_quotas: bool
) -> Results:
    samples = {phase.name: Samples() for phase in PHASES}
    with contextlib.ExitStack() as undo:
        put: Put = undo.enter_context(quotas()) if with_quotas else lambda name, pid: None
        processes = Processes("headroom-apart-")
        undo.callback(processes.stop)
        site = undo.enter_context(contextlib.closing(_Site(processes, nodes, pods_per_device, put)))
        play = undo.enter_context(contextlib.closing(_Play(site, nodes)))
        for turn in range(rounds):
            for phase in PHASES:
                typer.echo(f"round {turn + 1} of {rounds}: {phase.name}", err=True)
                play.play(phase, seconds, samples[phase.name])
        burst_s = play.burst()
    return Results(
        schema=SCHEMA,
        machine=processor(),
        cores=cores(),
        versions=versions(),
        seed=SEED,
        nodes=nodes,
        pods_per_device=pods_per_device,
        seconds=seconds,
        rounds=rounds,
        quotas=QUOTAS if with_quotas else {},
        burst_shown_in_s=round(burst_s, 2),
        phases=[finding(name, of, samples[IDLE.name]) for name, of in samples.items()],
    )


def main(
    nodes: Annotated[int, typer.Option(help="Number of nodes, with 8 GPUs each.")] = 5_000,
    pods_per_device: Annotated[int, typer.Option(help="Pods on each GPU.")] = 2,
    seconds: Annotated[float, typer.Option(help="Duration of each phase in each round.")] = 15.0,
    rounds: Annotated[int, typer.Option(min=1, help="Number of runs of all phases.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
    without_quotas: Annotated[
        bool, typer.Option("--without-quotas", help="Run without cgroups, which need root.")
    ] = False,
) -> None:
    found = results(nodes, pods_per_device, seconds, rounds, not without_quotas)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    else:
        show(found)


if __name__ == "__main__":
    typer.run(main)
