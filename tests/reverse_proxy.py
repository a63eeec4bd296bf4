"""HTTP reverse proxies in front of real servers, which run on a separate thread.

A ``Wire`` is the connection to one server. A test can slow it down, stall it or cut it.
"""

import asyncio
import contextlib
import random
import ssl
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from tests.certificates import Certificate
from tests.waiting import PATIENCE_S

MAX_BODY_BYTES = 1 << 26
#: Hop-by-hop headers, which a proxy does not forward.
_OWN_HEADERS = ("host", "connection", "keep-alive", "transfer-encoding")


class Broken(Exception):
    """The proxy must close the connection without a response."""


class Wire:
    def __init__(self) -> None:
        #: Maps each current fault to its severity, between 0 and 1.
        self.faults: Mapping[str, float] = {}
        #: Number of requests and connections that each fault affected.
        self.done: Counter[str] = Counter()
        #: Connections with a request in progress. For each, whether the request is a watch, and the
        #: event loop of the connection.
        self._open: dict[asyncio.Transport, tuple[bool, asyncio.AbstractEventLoop]] = {}

    @contextlib.contextmanager
    def used_by(self, connection: asyncio.Transport, is_watch: bool) -> Iterator[None]:
        self._open[connection] = is_watch, asyncio.get_running_loop()
        try:
            yield
        finally:
            del self._open[connection]

    async def passes(self) -> None:
        """Wait until the wire passes on a request or a part of a response."""
        if (force := self.faults.get("slow")) is not None:
            await asyncio.sleep((0.05 + 2.5 * force**3) * random.uniform(0.5, 1.5))
        while "stalled" in self.faults:  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.05)
        if "cut off" in self.faults:
            raise Broken

    def cut(self, watches_only: bool = False) -> None:
        """Close the connections of all requests in progress."""
        for connection, (is_watch, loop) in self._open.copy().items():
            if is_watch or not watches_only:
                self.done["cut"] += 1
                loop.call_soon_threadsafe(connection.abort)


class Service:
    """An address in front of servers. ``wires`` maps the URL of each server to its wire. Subclasses
    change the traffic.

    Each new connection prefers the next server. If this server does not listen or is cut off,
    another server gets the request.
    """

    #: ``Proxies.serve`` sets these attributes.
    session: aiohttp.ClientSession
    url: str
    port: int

    def __init__(self, wires: Mapping[str, Wire]) -> None:
        self.wires = wires
        #: Maps the client port of each connection to the number of the connection.
        self._connections: dict[int, int] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if (connection := request.transport) is not None:
            client_port = connection.get_extra_info("peername")[1]
            number = self._connections.setdefault(client_port, len(self._connections))
            servers = [*self.wires.items()]
            first = number % len(servers)
            with contextlib.suppress(Broken, aiohttp.ClientError, OSError):
                for url, wire in servers[first:] + servers[:first]:
                    if "cut off" in wire.faults:
                        continue
                    used = wire.used_by(connection, watches(request))
                    with contextlib.suppress(aiohttp.ClientConnectorError), used:
                        return await self.pass_on(request, url, wire)
            connection.abort()
        return web.Response(status=502)  # No client receives this response.

    async def pass_on(self, request: web.Request, url: str, wire: Wire) -> web.StreamResponse:
        await wire.passes()
        if (replacement := await self.before(request, wire)) is not None:
            return replacement
        async with self.sent(request, url) as answer:
            if (replacement := self.after(request, wire)) is not None:
                return replacement
            reply = web.StreamResponse(status=answer.status, headers=passed_on(answer.headers))
            await reply.prepare(request)
            async for part in answer.content.iter_any():
                await self.part_passes(request, wire, part)
                await reply.write(part)
            await reply.write_eof()
        return reply

    @contextlib.asynccontextmanager
    async def sent(self, request: web.Request, url: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send the request to the server. Yield the response as soon as its headers have
        arrived.
        """
        async with self.session.request(
            request.method,
            URL(url + request.raw_path, encoded=True),
            headers=passed_on(request.headers),
            data=await request.read(),
            allow_redirects=False,
        ) as answer:
            yield answer

    async def before(self, request: web.Request, wire: Wire) -> web.Response | None:
        """Wait until the request may pass to the server. Return a response to send it to the client
        instead.
        """
        return None

    def after(self, request: web.Request, wire: Wire) -> web.Response | None:
        """Return a response that replaces the server's response, of which the headers have
        arrived.
        """
        return None

    async def part_passes(self, request: web.Request, wire: Wire, part: bytes) -> None:
        """Wait until this part of a response may pass to the client."""
        await wire.passes()


class Proxies:
    """Serves services. ``certificate`` is the proxies' certificate for TLS. Servers with the same
    certificate are trusted.
    """

    def __init__(self, certificate: Certificate | None = None) -> None:
        self._server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._client_tls = ssl.create_default_context()
        if certificate is not None:
            self._server_tls.load_cert_chain(certificate.cert, certificate.key)
            self._client_tls.load_verify_locations(certificate.cert)
        self._running = contextlib.AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True).start()

    def serve(self, service: Service, tls: bool = False) -> int:
        """Serve the service and return its port."""
        asyncio.run_coroutine_threadsafe(self._serve(service, tls), self._loop).result(PATIENCE_S)
        return service.port

    def stop(self) -> None:
        """Close all services. The thread keeps running, because connections need time to close."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(PATIENCE_S)

    async def _serve(self, service: Service, tls: bool) -> None:
        service.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._client_tls, force_close=True),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )
        await self._running.enter_async_context(service.session)
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", service.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        self._running.push_async_callback(runner.cleanup)
        server_tls = self._server_tls if tls else None
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_tls)
        await site.start()
        service.port = runner.addresses[0][1]
        service.url = f"{'https' if tls else 'http'}://127.0.0.1:{service.port}"

    async def _end(self) -> None:
        await self._running.aclose()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


@contextlib.contextmanager
def proxy_to(*urls: str, certificate: Certificate | None = None) -> Iterator[tuple[Service, Wire]]:
    """Yield a proxy in front of these URLs, which serves TLS if a certificate is given, and its
    wire.
    """
    wire, proxies = Wire(), Proxies(certificate)
    service = Service(dict.fromkeys(urls, wire))
    try:
        proxies.serve(service, tls=certificate is not None)
        yield service, wire
    finally:
        proxies.stop()


@contextlib.contextmanager
def round_robin(ports: Sequence[int]) -> Iterator[str]:
    """Yield the URL of a proxy in front of these loopback ports."""
    with proxy_to(*(f"http://127.0.0.1:{port}" for port in ports)) as (service, _):
        yield service.url


def watches(request: web.Request) -> bool:
    return request.query.get("watch") == "true"


def passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the headers without hop-by-hop headers."""
    return CIMultiDict((k, v) for k, v in headers.items() if k.lower() not in _OWN_HEADERS)
