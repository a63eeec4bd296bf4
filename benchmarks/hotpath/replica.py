"""Runs a whole replica in its own process: the real wiring, verbs, debug API and in-memory store.

It also serves the echo route and the routes that control the measurement.
"""

import asyncio
import contextlib
import gc
import multiprocessing
import sys
import time
import tracemalloc
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvloop
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router

from benchmarks.hotpath.bodies import JSON
from benchmarks.hotpath.fleet import MIB, Fleet
from benchmarks.hotpath.machine import quiet
from extender.extender import Extender
from extender.ledger.embedded_store import AsyncStore, EmbeddedStore
from extender.scheduler.extender_v1 import decode_offer
from headroom.contract.kube import Node, Pod
from headroom.contract.watched import Relisted
from headroom.runtime.debug_port import debug_port
from headroom.runtime.memory_policy import limit_heap
from headroom.runtime.settings.settings import Settings
from headroom.serve.shared_process import console_beside, serve_beside

_START_S = 600.0


class Where(msgspec.Struct):
    """Ports on the loopback."""

    verbs: int
    debug: int


@contextlib.contextmanager
def replica(nodes: int, pods_per_device: int, target: Any = None) -> Iterator[Where]:
    """Run a replica in a child process. ``target`` replaces ``run`` as its function."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    args = (nodes, pods_per_device, theirs)
    child = context.Process(target=target or run, args=args)
    child.start()
    try:
        theirs.close()
        if not ours.poll(_START_S):
            raise RuntimeError(f"no replica of {nodes} nodes within {_START_S} s")
        yield ours.recv()
    finally:
        child.terminate()
        child.join()


def run(nodes: int, pods_per_device: int, pipe: Connection, best_only: bool = False) -> None:
    quiet()
    limit_heap()
    uvloop.run(_run(Fleet(nodes, pods_per_device), pipe, best_only))


async def _run(fleet: Fleet, pipe: Connection, best_only: bool) -> None:
    ports = {"verbs_port": 0, "debug_port": 0}
    settings = Settings(**ports, stale_after_s=1e9, filter_best_only=best_only)
    extender = Extender(settings, unready=lambda: "")
    store = EmbeddedStore(extender.deliver, time.monotonic)
    now_s = time.monotonic()
    extender.enqueue([Relisted(Node, tuple(map(fleet.kube_node, fleet.names)), now_s)])
    pods = [pod for name in fleet.names for pod in fleet.kube_pods(name)]
    extender.enqueue([Relisted(Pod, tuple(pods), now_s)])
    await extender.event_queue.idle()
    for name in fleet.names:
        gpunode = fleet.gpunode(name)
        assert gpunode.status is not None
        store.create_gpunode(gpunode)
        store.report([(name, gpunode.status)])
    await extender.event_queue.idle()
    await answer(extender, store, fleet, pipe)


async def answer(extender: Extender, store: EmbeddedStore, fleet: Fleet, pipe: Connection) -> None:
    """Serve until a signal arrives."""
    own = extender.verbs(extender.open_ledger(AsyncStore(store)))
    verbs = Router(default=extender.verbs_app(extender.open_ledger(AsyncStore(store))))
    reports = 0

    async def echo(request: Request) -> Response:
        body = await request.body()
        return Response(msgspec.json.encode(msgspec.json.decode(body)), media_type=JSON)

    async def report(_: Request) -> Response:
        """Let the next node report, so that every call comes after a change."""
        nonlocal reports
        reports += 1
        name = fleet.names[reports % len(fleet.names)]
        status = fleet.status(name, 64 * MIB * (reports % 8))
        began = time.perf_counter_ns()
        store.report([(name, status)])
        await extender.event_queue.idle()
        return Response(str(time.perf_counter_ns() - began))

    async def admit(request: Request) -> Response:
        """Create the pod of a filter call, so that it can be bound."""
        store.admit(decode_offer(await request.body()).pod)
        return Response()

    async def delete(request: Request) -> Response:
        """Delete the pod of a filter call."""
        metadata = decode_offer(await request.body()).pod.metadata
        store.delete_pod(metadata.namespace, metadata.name)
        return Response()

    async def allocations(request: Request) -> Response:
        """Return the allocations of one call. Measuring them slows the call down."""
        body, verb = await request.body(), request.path_params["verb"]
        gc.collect()
        tracemalloc.start()
        blocks = sys.getallocatedblocks()
        if verb == "bind":
            await own.bind(body)
        else:
            getattr(own, verb)(body)
        blocks = sys.getallocatedblocks() - blocks
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return Response(msgspec.json.encode({"peak_bytes": peak_bytes, "blocks_kept": blocks}))

    for path, endpoint in (
        ("/echo", echo),
        ("/drive/report", report),
        ("/drive/admit", admit),
        ("/drive/delete", delete),
        ("/drive/allocations/{verb}", allocations),
    ):
        verbs.add_route(path, endpoint, methods=["POST"])
    console = console_beside(extender)
    debug = console.app()

    def announce(line: str) -> None:
        message = msgspec.json.decode(line)
        ports = {which: urlsplit(message[which]).port for which in ("verbs", "debug")}
        pipe.send(Where(ports["verbs"] or 0, ports["debug"] or 0))

    await asyncio.sleep(0)
    ledger = extender.open_ledger(AsyncStore(store))
    second = debug_port(extender.settings, debug, None)
    await serve_beside(extender, ledger, verbs, second, announce, console)
