"""Prints a short table that compares filter and prioritize with only reading and writing their
bodies.

Every call is for another pod, lists all nodes in another order, and follows a bind, so it includes
the cost of a new snapshot. Server and client are two processes, and the calls use HTTP on the
loopback. After each verb, the client sends the same body to the *echo*, so the ratio is also valid
on a busy machine. The echo is a route of the same server: it decodes the body with msgspec into
plain Python values, encodes them again and decides nothing. Its answer is smaller than the answer
of prioritize.

Then the calls are repeated with timers in the verbs, to show the time spent in each step.
"""

import functools
import gc
import multiprocessing
import random
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import typer
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router

from benchmarks.hotpath.bodies import GPU, JSON, SEED, Bodies, bind_of, names_of
from benchmarks.hotpath.calling import Caller
from benchmarks.hotpath.machine import machine, quiet
from extender.ledger.bind_call import BindRequest, Failed, Outcome
from extender.metrics import Telemetry
from extender.scheduler import extender_v1
from extender.scheduler.filter import Filter
from extender.scheduler.prioritize import Prioritize
from extender.scheduler.scheduling_state import SchedulingState
from extender.scheduler.server import Verbs, VerbsApp
from headroom.contract.gpunode import (
    Charge,
    Device,
    GPUNode,
    GPUNodeSpec,
    GPUNodeStatus,
    Replicas,
    Reservation,
)
from headroom.contract.kube import Node, ObjectMeta
from headroom.contract.watched import GPUNodeSeen, NodeSeen
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.journal.journal import Journal
from headroom.core.placement.fit_cache import CachedFit, FitCache
from headroom.core.placement.policy import Rules
from headroom.core.placement.snapshot import Snapshot
from headroom.runtime.memory_policy import limit_heap
from headroom.runtime.settings.settings import Settings

GIB = 1 << 30
DEVICES = 8
REPLICAS = 4
WARM_UP = 20


class Fleet:
    """Nodes of time-sliced 80 GiB GPUs. A third of their memory stays reserved."""

    def __init__(self, nodes: int) -> None:
        self._random = random.Random(SEED)
        self.names = names_of(nodes)
        self._stamp = datetime.now(UTC).isoformat()
        self._serial = 0
        self._reservations: dict[str, dict[str, Reservation]] = {name: {} for name in self.names}
        self._devices = {name: self._report(name) for name in self.names}
        self.state = ClusterWriter(Rules(), 1e9, time.time() - time.monotonic())
        self.state.apply(NodeSeen(Node(metadata=ObjectMeta(name=name))) for name in self.names)
        for name in self.names:
            for _ in range(self._random.randrange(4)):
                self._reserve(name)
        self.state.apply([self._seen(name) for name in self.names])

    def _report(self, name: str) -> list[Device]:
        return [
            Device(
                uuid=f"GPU-{name}-{i}",
                memory_bytes=80 * GIB,
                reserved_bytes=GIB // 2,
                used_bytes=0,
                unattributed_bytes=0,
                sharing="time-slicing",
                resource=GPU,
                replicas=Replicas(free=self._random.randrange(REPLICAS + 1), allocated=0),
            )
            for i in range(DEVICES)
        ]

    def _reserve(self, name: str) -> None:
        self._serial += 1
        size = self._random.choice([4, 8, 12, 20]) * GIB
        charge = Charge(
            resource=GPU, count=1, candidates={f"GPU-{name}-{i}": size for i in range(DEVICES)}
        )
        reservation = Reservation(namespace="default", name=f"q{self._serial}", charges=[charge])
        self._reservations[name][f"uid-{self._serial}"] = reservation

    def _seen(self, name: str) -> GPUNodeSeen:
        self._serial += 1
        return GPUNodeSeen(
            GPUNode(
                metadata=ObjectMeta(name=name, uid=name, resource_version=str(self._serial)),
                spec=GPUNodeSpec(initialised=True, reservations=dict(self._reservations[name])),
                status=GPUNodeStatus(observed_at=self._stamp, devices=self._devices[name]),
            ),
            time.monotonic(),
        )

    def bind_one(self) -> None:
        """Reserve memory on a random node. If it has many reservations, remove the oldest."""
        name = self._random.choice(self.names)
        if len(self._reservations[name]) > 3:
            del self._reservations[name][next(iter(self._reservations[name]))]
        self._reserve(name)
        self.state.apply([self._seen(name)])


def verbs_of(fleet: Fleet, telemetry: Telemetry) -> Verbs:
    class NoBinds:
        async def bind(self, ask: BindRequest) -> Outcome:
            return Failed("no binds here")

    replica: Any = SimpleNamespace(
        observes=False,
        settings=Settings(filter_best_only=False),
        unready=lambda: "",
        deliver=fleet.state.apply,
    )
    cluster, calls = fleet.state.cluster, fleet.state.parts.calls
    return Verbs(SchedulingState(cluster, calls, Journal(), telemetry, replica, time), NoBinds())


class Stopwatch:
    """Measures the time spent in parts of a verb, excluding the parts within them."""

    PARTS = (
        ("decode", extender_v1, "decode_offer"),
        ("understand the pod", Cluster, "understand"),
        ("look up names", Snapshot, "rows"),
        ("weigh what changed", FitCache, "weigh"),
        ("pick the verdicts", CachedFit, "codes"),
        ("rank", CachedFit, "rank"),
        ("encode", extender_v1, "encode_filter"),
        ("encode", extender_v1, "encode_priorities"),
        ("filter", Filter, "__call__"),
        ("prioritize", Prioritize, "__call__"),
    )

    def __init__(self) -> None:
        #: Verb -> nanoseconds of each part, for each call.
        self.calls: dict[str, list[dict[str, int]]] = {"filter": [], "prioritize": []}
        self._within = [0]
        self._parts: dict[str, int] = {}

    def attach(self) -> None:
        for part, owner, name in self.PARTS:
            setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any) -> Any:
            self._within.append(0)
            began = time.perf_counter_ns()
            answer = function(*args)
            took = time.perf_counter_ns() - began
            self._parts[part] = self._parts.get(part, 0) + took - self._within.pop()
            self._within[-1] += took
            if part in self.calls:
                self.calls[part].append(self._parts)
                self._parts = {}
            return answer

        return timed


def serve(nodes: int, stopwatch: bool, pipe: Connection) -> None:
    """Run the child process: verbs and echo on one server, on a free port of the loopback."""
    quiet()
    limit_heap()
    watch = Stopwatch()
    if stopwatch:
        watch.attach()
    fleet = Fleet(nodes)
    telemetry = Telemetry(CollectorRegistry())
    verbs = verbs_of(fleet, telemetry)
    app = Router(default=VerbsApp(verbs, telemetry, max_body_bytes=64 << 20))

    async def echo(request: Request) -> Response:
        body = await request.body()
        return Response(msgspec.json.encode(msgspec.json.decode(body)), media_type=JSON)

    async def bind_one(_: Request) -> Response:
        began = time.perf_counter_ns()
        fleet.bind_one()
        # The wiring does the same after a bind.
        fleet.state.cluster.snapshot()
        return Response(str(time.perf_counter_ns() - began))

    async def parts(_: Request) -> Response:
        return Response(msgspec.json.encode(watch.calls))

    app.add_route("/echo", echo, methods=["POST"])
    app.add_route("/bind-one", bind_one, methods=["POST"])
    app.add_route("/parts", parts, methods=["POST"])
    gc.collect()
    gc.freeze()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pipe.send(listening.getsockname()[1])
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
        uvicorn.Server(config).run(sockets=[listening])


@dataclass
class Measured:
    """Nanoseconds of each call. The i-th echo had the same body as the i-th call of the verb."""

    verbs: dict[str, list[int]]
    echoes: dict[str, list[int]]
    #: Nanoseconds for a report and the snapshot after it.
    reports: list[int]
    #: Verb -> parts of each call; empty without a stopwatch.
    parts: dict[str, list[dict[str, int]]]


def measure(nodes: int, calls: int, stopwatch: bool = False) -> Measured:
    found = Measured({"filter": [], "prioritize": []}, {"filter": [], "prioritize": []}, [], {})
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=serve, args=(nodes, stopwatch, theirs))
    child.start()
    try:
        bodies = Bodies(nodes)
        caller = Caller(ours.recv())

        def call(verb: str, body: bytes) -> bytes:
            found.echoes[verb].append(caller.post("echo", body)[1])
            answer, took = caller.post(verb, body)
            found.verbs[verb].append(took)
            return answer

        for _ in range(calls + WARM_UP):
            found.reports.append(int(caller.post("bind-one")[0]))
            body = bodies.another()
            passed = msgspec.json.decode(call("filter", body))["NodeNames"]
            call(
                "prioritize",
                msgspec.json.encode({**msgspec.json.decode(body), "NodeNames": passed}),
            )
            caller.post("bind", bind_of(body))
        if stopwatch:
            found.parts = msgspec.json.decode(caller.post("parts")[0])
        caller.close()
    finally:
        child.terminate()
        child.join()
    for kept in (found.verbs, found.echoes, found.parts):
        for series in kept.values():
            del series[:WARM_UP]
    del found.reports[:WARM_UP]
    return found


def show(nodes: int, found: Measured) -> None:
    for verb, took in found.verbs.items():
        echoed = np.percentile(found.echoes[verb], [50, 99])
        p50, p99 = np.percentile(took, [50, 99])
        of_echo = f"{echoed[0] / 1e6:>10.3f}{echoed[1] / 1e6:>9.3f}"
        ratios = f"{p50 / echoed[0]:>11.2f}{p99 / echoed[1]:>7.2f}"
        typer.echo(f"{nodes:>6}  {verb:<11}{p50 / 1e6:>9.3f}{p99 / 1e6:>9.3f}{of_echo}{ratios}")


def show_parts(nodes: int, found: Measured) -> None:
    typer.echo(f"\nWhere the time goes at {nodes} nodes, p50 in ms, with a stopwatch in the verbs:")
    for verb, calls in found.parts.items():
        typer.echo(f"  {verb}")
        within = 0.0
        for part in dict.fromkeys(part for call in calls for part in call):
            p50 = float(np.median([call.get(part, 0) for call in calls]))
            within += p50
            label = "the verb itself" if part == verb else part
            typer.echo(f"    {label:<40}{p50 / 1e6:>8.3f}")
        rest = float(np.median(found.verbs[verb])) - within
        typer.echo(f"    {'HTTP in client, server and loopback':<40}{rest / 1e6:>8.3f}")
    p50, p99 = np.percentile(found.reports, [50, 99]) / 1e6
    typer.echo(f"  a report and its snapshot: p50 {p50:.3f}, p99 {p99:.3f}")


def tabulate(calls: int, sizes: Sequence[int]) -> None:
    """Print p50 and p99, their ratios to the echo's figures, and where the time goes."""
    typer.echo(machine())
    typer.echo(
        f"{'':>19}{'p50 ms':>9}{'p99 ms':>9}{'echo p50':>10}{'p99':>9}{'ratio p50':>11}{'p99':>7}"
    )
    for size in sizes:
        show(size, measure(size, calls))
    show_parts(sizes[-1], measure(sizes[-1], calls, stopwatch=True))
