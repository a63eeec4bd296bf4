"""The proxies of a storm: every connection of Headroom goes through one of them.

A *service* is an address in front of one or more backends. A *wire* belongs to a process: it can be
slow or cut. On the way to the API server it can also drop requests, answer them itself, before or
after the API server processed them, or pass them on after the client has given up.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import random
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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

from tests.certificates import Certificate
from tests.chaos.calls import Call
from tests.processes import free_ports

MAX_BODY_BYTES = 1 << 26
#: Headers of one connection, which a proxy does not pass on.
_OWN_HEADERS = ("host", "connection", "keep-alive", "transfer-encoding")
_REASONS = {409: "Conflict", 429: "TooManyRequests", 500: "InternalError"}


class _Broken(Exception):
    """The connection must end without an answer."""


@dataclass
class Wire:
    #: Faults that it has now, and the force of each (0..1).
    faults: Mapping[str, float] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    #: Connection with a request in progress -> whether that is a watch.
    open: dict[asyncio.Transport, bool] = field(default_factory=dict)

    async def passes(self) -> None:
        """Return when a request, or a part of an answer, may pass."""
        if (force := self.faults.get("slow")) is not None:
            await asyncio.sleep((0.05 + 2.5 * force**3) * random.uniform(0.5, 1.5))
        while "stalled" in self.faults:  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.05)
        if "cut off" in self.faults:
            raise _Broken

    def hits(self, fault: str, share: float = 1.0) -> bool:
        """Draw whether this request has the fault: 10 to 60 % of all have, times ``share``."""
        force = self.faults.get(fault)
        hit = force is not None and random.random() < share * (0.1 + 0.5 * force)
        self.done[fault] += hit
        return hit

    def answers(self, fault: str, writes: bool) -> int | None:
        """Return the status of an answer that the proxy makes up. Only writes conflict."""
        hit = (s for s in _REASONS if (writes or s != 409) and self.hits(f"{fault} {s}"))
        return next(hit, None)


@dataclass
class Service:
    #: URL -> wire. Each connection prefers the next one.
    backends: Mapping[str, Wire]
    tls: bool = False
    #: Whether the wire also changes requests and answers.
    meddles: bool = False
    #: Whether the calls are recorded.
    records: bool = False
    port: int = field(default_factory=lambda: free_ports(1)[0])

    def __post_init__(self) -> None:
        self._turns = itertools.cycle(range(len(self.backends)))
        #: Port of the client -> number of the backend.
        self._firsts: dict[int, int] = {}

    def candidates(self, connection: asyncio.Transport) -> list[tuple[str, Wire]]:
        client_port = connection.get_extra_info("peername")[1]
        if client_port not in self._firsts:
            self._firsts[client_port] = next(self._turns)
        found, first = [*self.backends.items()], self._firsts[client_port]
        return [each for each in found[first:] + found[:first] if "cut off" not in each[1].faults]


class Proxies:
    """Serves services on a thread of its own."""

    def __init__(self, certificate: Certificate) -> None:
        self._certificate = certificate
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._running = contextlib.AsyncExitStack()
        self._calls: list[tuple[float, Call]] = []

    def start(self, services: Iterable[Service]) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(services), self._loop).result(30.0)

    def stop(self) -> None:
        """Close all services. The thread stays, because connections need time to close."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30.0)

    def cut(self, wire: Wire, watches_only: bool = False) -> None:
        """Close the wire's open connections."""

        def abort() -> None:
            for connection, watches in wire.open.items():
                if watches or not watches_only:
                    wire.done["cut"] += 1
                    connection.abort()

        self._loop.call_soon_threadsafe(abort)

    def taken_calls(self) -> list[Call]:
        """Return all recorded calls, and forget those that ended."""
        now_s, found = time.monotonic(), []
        for began_s, call in [*self._calls]:
            if call.ended:
                self._calls.remove((began_s, call))
                found.append(call)
            else:
                found.append(dataclasses.replace(call, took_s=now_s - began_s))
        return found

    async def _serve(self, services: Iterable[Service]) -> None:
        server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        server_tls.load_cert_chain(self._certificate.cert, self._certificate.key)
        client_tls = ssl.create_default_context(cafile=str(self._certificate.cert))
        self._session = await self._running.enter_async_context(
            ClientSession(
                connector=TCPConnector(limit=0, ssl=client_tls, force_close=True),
                auto_decompress=False,
                timeout=ClientTimeout(),
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            )
        )
        for service in services:
            app = web.Application(client_max_size=MAX_BODY_BYTES)
            app.router.add_route("*", "/{path:.*}", functools.partial(self._answer, service))
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            self._running.push_async_callback(runner.cleanup)
            tls = server_tls if service.tls else None
            await web.TCPSite(runner, "127.0.0.1", service.port, ssl_context=tls).start()

    async def _end(self) -> None:
        await self._running.aclose()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _answer(self, service: Service, request: web.Request) -> web.StreamResponse:
        connection = request.transport
        if connection is None:  # the client has gone
            return web.Response()
        body, began_s = await request.read(), time.monotonic()
        call = Call(request.path.rpartition("/")[2])
        if service.records:
            call.asked = json.loads(body or b"null")
            self._calls.append((began_s, call))
        try:
            for url, wire in service.candidates(connection):
                wire.open[connection] = request.query.get("watch") == "true"
                try:
                    return await self._pass(service, request, body, url, wire, call)
                except ClientConnectorError:
                    continue  # the process does not listen
                finally:
                    del wire.open[connection]
        except (_Broken, ClientError, OSError):
            pass
        finally:
            call.took_s, call.ended = time.monotonic() - began_s, True
        connection.abort()
        return web.Response()

    async def _pass(
        self,
        service: Service,
        request: web.Request,
        body: bytes,
        url: str,
        wire: Wire,
        call: Call,
    ) -> web.StreamResponse:
        watches, writes = request.query.get("watch") == "true", request.method != "GET"
        await wire.passes()
        if service.meddles:
            if wire.hits("requests dropped", share=0.5):
                raise _Broken
            if status := wire.answers("answered", writes):
                return _error(status)
            if not watches and wire.hits("passed on late", share=0.5):
                await asyncio.sleep(3.0 + 40.0 * wire.faults.get("passed on late", 0.0))
        async with self._session.request(
            request.method,
            URL(url + request.raw_path, encoded=True),
            headers=_passed_on(request.headers),
            data=body,
            allow_redirects=False,
        ) as answer:
            if service.meddles and not watches:
                if wire.hits("done and not answered"):
                    await answer.read()
                    raise _Broken
                if status := wire.answers("done and answered", writes):
                    await answer.read()
                    return _error(status)
            reply = web.StreamResponse(status=answer.status, headers=_passed_on(answer.headers))
            await reply.prepare(request)
            content = bytearray()
            async for part in answer.content.iter_any():
                if not service.meddles:
                    await wire.passes()
                if service.records:
                    content += part
                await reply.write(part)
            await reply.write_eof()
            if service.records and answer.status == 200:
                call.answer = json.loads(content or b"null")
        return reply


def _passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((k, v) for k, v in headers.items() if k.lower() not in _OWN_HEADERS)


def _error(status: int) -> web.Response:
    """Return an error as the API server writes it."""
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
    body |= {"reason": _REASONS[status], "message": "made up by the storm"}
    headers = {"Retry-After": "1"} if status == 429 else {}
    return web.json_response(body, status=status, headers=headers)
