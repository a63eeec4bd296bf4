"""HTTP reverse proxies: addresses in front of real servers, served on a separate thread.

A *wire* leads to a server. It can be slow, stalled or cut.
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
    """The connection must end without a response."""


class Wire:
    def __init__(self) -> None:
        #: Current faults, with the severity of each (0..1).
        self.faults: Mapping[str, float] = {}
        #: Number of requests and connections that had each fault.
        self.done: Counter[str] = Counter()
        #: Connections with a request in progress, whether it is a watch, and the loop.
        self._open: dict[asyncio.Transport, tuple[bool, asyncio.AbstractEventLoop]] = {}

    @contextlib.contextmanager
    def used_by(self, connection: asyncio.Transport, is_watch: bool) -> Iterator[None]:
        self._open[connection] = is_watch, asyncio.get_running_loop()
        try:
            yield
        finally:
            del self._open[connection]

    async def passes(self) -> None:
        """Return when a request, or a part of a response, may pass."""
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
    """An address in front of servers (URL -> wire). Subclasses change the traffic.

    Each connection prefers the next server. Another server gets the request if the preferred one
    does not listen, or is cut off.
    """

    #: Set when it is served.
    session: aiohttp.ClientSession
    url: str
    port: int

    def __init__(self, wires: Mapping[str, Wire]) -> None:
        self.wires = wires
        #: Number of the connection of each client port.
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
        return web.Response(status=502)  # No client receives it.

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
        """Send the request to the server. Yield its response when the head has arrived."""
        async with self.session.request(
            request.method,
            URL(url + request.raw_path, encoded=True),
            headers=passed_on(request.headers),
            data=await request.read(),
            allow_redirects=False,
        ) as answer:
            yield answer

    async def before(self, request: web.Request, wire: Wire) -> web.Response | None:
        """Return when the request may pass to the server, or return a response for the client
        instead.
        """
        return None

    def after(self, request: web.Request, wire: Wire) -> web.Response | None:
        """Return the response for the client instead of the server's, whose head has arrived."""
        return None

    async def part_passes(self, request: web.Request, wire: Wire, part: bytes) -> None:
        """Return when this part of a response may pass to the client."""
        await wire.passes()


class Proxies:
    """Serves services. ``certificate`` is used for TLS, and trusted in the servers."""

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
        """Return the port of the service."""
        asyncio.run_coroutine_threadsafe(self._serve(service, tls), self._loop).result(PATIENCE_S)
        return service.port

    def stop(self) -> None:
        """Close all services. The thread stays, because connections need time to close."""
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
    """Yield an address in front of these URLs, with TLS if there is a certificate, and the wire."""
    wire, proxies = Wire(), Proxies(certificate)
    service = Service(dict.fromkeys(urls, wire))
    try:
        proxies.serve(service, tls=certificate is not None)
        yield service, wire
    finally:
        proxies.stop()


@contextlib.contextmanager
def round_robin(ports: Sequence[int]) -> Iterator[str]:
    """Yield an address in front of these ports of loopback."""
    with proxy_to(*(f"http://127.0.0.1:{port}" for port in ports)) as (service, _):
        yield service.url


def watches(request: web.Request) -> bool:
    return request.query.get("watch") == "true"


def passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the headers without hop-by-hop headers."""
    return CIMultiDict((k, v) for k, v in headers.items() if k.lower() not in _OWN_HEADERS)
