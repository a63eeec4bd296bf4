"""The proxies of a storm, in a process of their own: python -m tests.chaos.proxy CONFIG.json

A *service* is an address in front of one or more backends; each connection stays with one of them.
All of Headroom's connections go through services: to the API server, and from kube-scheduler, the
API server and the consoles. A *wire* belongs to a process: it can be slow or cut. On the way to the
API server it can also drop requests, answer them itself, before or after the API server processed
them, or pass them on after the client has given up. POST to the control port sets the faults of
wires and returns counts, and the recorded calls of kube-scheduler.
"""

import asyncio
import contextlib
import itertools
import json
import random
import ssl
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientSession,
    ClientTimeout,
    TCPConnector,
    web,
)
from multidict import CIMultiDict
from yarl import URL

MAX_BODY_BYTES = 1 << 26
#: Headers of one connection, which a proxy does not pass on.
_OWN_HEADERS = ("host", "connection", "keep-alive", "transfer-encoding")
_REASONS = {409: "Conflict", 429: "TooManyRequests", 500: "InternalError"}


@dataclass(frozen=True, slots=True)
class Faults:
    """All ratios are of requests."""

    latency_s: float = 0.0
    #: Connections are closed.
    refuses: bool = False
    #: Connections are accepted, but no data passes.
    holds: bool = False
    drop_ratio: float = 0.0
    #: A status to return without passing the request on.
    answer: int = 0
    answer_ratio: float = 0.0
    #: A status to return when the request was processed; 0: the connection breaks.
    after: int = 0
    after_ratio: float = 0.0
    #: Requests that are passed on late.
    late_s: float = 0.0
    late_ratio: float = 0.0


NO_FAULTS = Faults()


class _Broken(Exception):
    """The connection must end without an answer."""


@dataclass
class Wire:
    faults: Faults = NO_FAULTS
    done: Counter[str] = field(default_factory=Counter)
    #: Connection with a request in progress -> whether that is a watch.
    open: dict[asyncio.Transport, bool] = field(default_factory=dict)
    _flows: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.set(self.faults)

    def set(self, faults: Faults) -> None:
        self.faults = faults
        (self._flows.clear if faults.holds else self._flows.set)()

    def cut(self, watches_only: bool) -> None:
        for connection, watches in list(self.open.items()):
            if watches or not watches_only:
                self.done["cut"] += 1
                connection.abort()

    async def passes(self, lots: random.Random) -> None:
        """Return when a request, or a part of an answer, may pass."""
        if self.faults.latency_s:
            await asyncio.sleep(self.faults.latency_s * lots.uniform(0.5, 1.5))
        await self._flows.wait()
        if self.faults.refuses:
            raise _Broken


class Service:
    def __init__(
        self,
        backends: Iterable[tuple[str, Wire]],
        session: ClientSession,
        lots: random.Random,
        *,
        meddles: bool,
        calls: list[dict[str, Any]] | None,
    ) -> None:
        """``meddles``: it changes requests and answers as well. ``calls`` records them."""
        self._backends = list(backends)
        self._turns = itertools.cycle(range(len(self._backends)))
        #: Port of the client -> number of the backend.
        self._chosen: dict[int, int] = {}
        self._session, self._lots = session, lots
        self._meddles, self._calls = meddles, calls

    async def serve(self, request: web.Request) -> web.StreamResponse:
        body, connection = await request.read(), request.transport
        if connection is None:  # the client has gone
            return web.Response()
        with self._recorded(request, body) as parts:
            try:
                for url, wire in self._candidates(connection):
                    wire.open[connection] = request.query.get("watch") == "true"
                    try:
                        return await self._pass(request, body, url, wire, parts)
                    except ClientConnectorError:
                        continue  # the process does not listen
                    finally:
                        del wire.open[connection]
            except (_Broken, ClientError, OSError):
                pass
            parts.clear()
        connection.abort()
        return web.Response()

    def _candidates(self, connection: asyncio.Transport) -> Iterator[tuple[str, Wire]]:
        """Yield the backend of this connection, then the others, without those that are cut."""
        client = connection.get_extra_info("peername")[1]
        first = self._chosen.get(client)
        for _ in self._backends:
            number = next(self._turns) if first is None else first
            first = None
            if not self._backends[number][1].faults.refuses:
                self._chosen[client] = number
                yield self._backends[number]

    async def _pass(
        self, request: web.Request, body: bytes, url: str, wire: Wire, parts: list[bytes]
    ) -> web.StreamResponse:
        chance, watches = self._lots.random, request.query.get("watch") == "true"
        wire.done["WATCH" if watches else request.method] += 1
        await wire.passes(self._lots)
        faults = wire.faults if self._meddles else NO_FAULTS
        writes = request.method != "GET"  # only writes conflict
        if chance() < faults.drop_ratio:
            wire.done["dropped"] += 1
            raise _Broken
        if chance() < faults.answer_ratio and (writes or faults.answer != 409):
            wire.done[f"answered {faults.answer}"] += 1
            return _answer(faults.answer)
        if not watches and chance() < faults.late_ratio:
            wire.done["late"] += 1
            await asyncio.sleep(faults.late_s)
        async with self._session.request(
            request.method,
            URL(url + request.raw_path, encoded=True),
            headers=_passed_on(request.headers),
            data=body,
            allow_redirects=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        ) as answer:
            meddled = not watches and (writes or faults.after != 409)
            if meddled and chance() < faults.after_ratio:
                wire.done[f"done, answered {faults.after or 'nothing'}"] += 1
                await answer.read()
                if not faults.after:
                    raise _Broken
                return _answer(faults.after)
            reply = web.StreamResponse(status=answer.status, headers=_passed_on(answer.headers))
            await reply.prepare(request)
            async for part in answer.content.iter_any():
                if not self._meddles:
                    await wire.passes(self._lots)
                if self._calls is not None:
                    parts.append(part)
                await reply.write(part)
            await reply.write_eof()
            if answer.status != 200:
                parts.clear()
        return reply

    @contextlib.contextmanager
    def _recorded(self, request: web.Request, body: bytes) -> Iterator[list[bytes]]:
        """Record a call. The yielded list takes the body of an answer with status 200."""
        parts: list[bytes] = []
        if self._calls is None:
            yield parts
            return
        call: dict[str, Any] = {"verb": request.path.rpartition("/")[2], "ended": False}
        call |= {"began_s": time.monotonic(), "asked": json.loads(body or b"null"), "answer": None}
        self._calls.append(call)
        try:
            yield parts
        finally:
            call |= {"ended": True, "took_s": time.monotonic() - call.pop("began_s")}
            with contextlib.suppress(ValueError):  # it broke off
                call["answer"] = json.loads(b"".join(parts) or b"null")


def taken(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all recorded calls; forget those that ended."""
    now_s, found = time.monotonic(), []
    for call in calls:
        began_s = call.get("began_s")
        found.append({**call, **({"took_s": now_s - began_s} if began_s else {})})
        found[-1].pop("began_s", None)
    calls[:] = [call for call in calls if not call["ended"]]
    return found


def _passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((k, v) for k, v in headers.items() if k.lower() not in _OWN_HEADERS)


def _answer(status: int) -> web.Response:
    """Return an error as the API server writes it."""
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
    body |= {"reason": _REASONS[status], "message": "made up by the storm"}
    headers = {"Retry-After": "1"} if status == 429 else {}
    return web.json_response(body, status=status, headers=headers)


async def main(config: Mapping[str, Any]) -> None:
    wires: defaultdict[str, Wire] = defaultdict(Wire)
    calls: list[dict[str, Any]] = []

    async def control(request: web.Request) -> web.Response:
        shown = await request.json()
        for name, faults in shown.get("set", {}).items():
            wires[name].set(Faults(**faults))
        for name in shown.get("cut", ()):
            wires[name].cut(watches_only=False)
        for name in shown.get("cut_watches", ()):
            wires[name].cut(watches_only=True)
        done = sum((wire.done for wire in wires.values()), Counter())
        return web.json_response({"done": done, "calls": taken(calls) if "calls" in shown else []})

    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(config["cert"], config["key"])
    client = ssl.create_default_context(cafile=config["cert"])
    connector = TCPConnector(limit=0, ssl=client, force_close=True)
    options = {"connector": connector, "auto_decompress": False, "timeout": ClientTimeout()}
    async with ClientSession(**options) as session:
        for each in config["services"]:
            service = Service(
                [(url, wires[name]) for url, name in each["backends"]],
                session,
                random.Random(f"{config['seed']} {each['port']}"),
                meddles=each["meddles"],
                calls=calls if each["records"] else None,
            )
            await _listen(service.serve, each["port"], server if each["tls"] else None)
        await _listen(control, config["control_port"], None)
        await asyncio.get_running_loop().create_future()


async def _listen(serve: Any, port: int, tls: ssl.SSLContext | None) -> None:
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_route("*", "/{path:.*}", serve)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
