"""An HTTP server for GET requests on which no client can block others.

One thread with an event loop serves all connections, so a slow client costs only its connection. A
route that may block has its own threads, so it does not delay other routes. Bytes and seconds of
each connection are limited. If there are more than ``MAX_CONNECTIONS``, the address with the most
connections loses one.
"""

import asyncio
import contextlib
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
from queue import SimpleQueue

import structlog

from contract.listening import listening_socket

_log = structlog.get_logger()

MAX_CONNECTIONS = 256
#: Maximum size of request line and headers. Requests have no body.
MAX_REQUEST_BYTES = 16 << 10
#: Seconds within which the request must arrive.
REQUEST_S = 5.0
#: Seconds after which a connection is closed, whatever its state.
CONNECTION_S = 30.0
#: Bytes of an answer that the kernel buffers while the client does not read.
_SEND_BUFFER_BYTES = 64 << 10
#: Connections that may wait to be accepted.
_BACKLOG = 1024
#: Maximum number of connections that the event loop accepts in one step.
_ACCEPT_AT_ONCE = 64
_END = b"\r\n\r\n"

TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes
    content_type: str = TEXT
    #: Follows ``body``. Many answers have the same object, so slow clients take no memory for it.
    shared: bytes = b""

    def head(self) -> bytes:
        lines = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body) + len(self.shared)}",
            "Connection: close",
        )
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode("ascii")


@dataclass(frozen=True, slots=True)
class Route:
    #: Takes the query string.
    answer: Callable[[str], Answer]
    #: Number of its threads if it may block; 0 if it never blocks.
    threads: int = 0
    #: Returns the answer if that does not block, otherwise None: then a thread is asked. A thread
    #: costs more CPU than a small answer.
    at_once: Callable[[str], Answer | None] = lambda query: None


@dataclass(eq=False, slots=True)
class _Connection:
    #: Address of the client.
    address: str
    task: asyncio.Task[None]
    #: Whether the request has not arrived completely.
    reading: bool = True


class _Threads:
    """The threads of a route that may block.

    They are daemons, unlike those of an executor, so a blocked thread does not keep the process
    from ending.
    """

    def __init__(self, name: str, count: int) -> None:
        self._count = count
        self._jobs: SimpleQueue[tuple[Future[Answer], Callable[[], Answer]] | None] = SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._serve, name=name, daemon=True).start()

    def give(self, work: Callable[[], Answer]) -> Future[Answer]:
        future: Future[Answer] = Future()
        self._jobs.put((future, work))
        return future

    def close(self) -> None:
        for _ in range(self._count):
            self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            if not future.set_running_or_notify_cancel():
                continue  # the connection was closed
            try:
                future.set_result(work())
            except Exception as err:  # noqa: BLE001 - raised again by the caller that awaits it
                future.set_exception(err)


class HttpPort:
    """Serves ``routes`` (path -> route) on ``host:port`` (0: any free port; ``::``: IPv4 too).

    The constructor raises ``OSError`` if the port cannot be opened.
    """

    def __init__(self, name: str, host: str, port: int, routes: Mapping[str, Route]) -> None:
        self._socket = listening_socket(host, port, _BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        self._routes = routes
        self._threads = {
            path: _Threads(f"{name}{path}", route.threads)
            for path, route in routes.items()
            if route.threads
        }
        #: Address -> its connections, oldest first.
        self._open: defaultdict[str, dict[_Connection, None]] = defaultdict(dict)
        self._count = 0
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()
        self._socket.close()
        self._loop.close()
        for threads in self._threads.values():
            threads.close()

    async def respond(self, request: bytes) -> Answer:
        """Return the answer to a request, given as request line and headers."""
        try:
            method, target, _ = request.partition(b"\r\n")[0].decode("ascii").split(" ")
        except ValueError:
            return Answer(400, b"not a request; example: GET /healthz HTTP/1.1\n")
        path, _, query = target.partition("?")
        route = self._routes.get(path)
        if route is None:
            return Answer(404, f"not found; try {', '.join(self._routes)}\n".encode())
        if method != "GET":
            return Answer(405, b"only GET is answered\n")
        try:
            if threads := self._threads.get(path):
                if (answer := route.at_once(query)) is not None:
                    return answer
                return await asyncio.wrap_future(threads.give(lambda: route.answer(query)))
            return route.answer(query)
        except Exception:  # noqa: BLE001 - a failed request must not affect others
            _log.exception("answer_failed", path=path)
            return Answer(500, b"the agent could not answer; its log has the error\n")

    def _run(self) -> None:
        self._loop.set_exception_handler(_report)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._accepted, sock=self._socket, limit=MAX_REQUEST_BYTES, backlog=_ACCEPT_AT_ONCE
        )
        self._socket.listen(_BACKLOG)
        await self._ended.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, and close it after ``CONNECTION_S`` at the latest."""
        peer = writer.get_extra_info("peername")
        task = asyncio.current_task()
        assert task is not None
        connection = _Connection(peer[0] if peer else "", task)
        self._add(connection)
        try:
            async with asyncio.timeout(CONNECTION_S):
                await self._exchange(connection, reader, writer)
        except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError):
            pass  # the client closed the connection, was too slow or sent too much
        except asyncio.CancelledError:
            pass  # cancelled by _add or _serve; before Python 3.12 the loop would log it
        finally:
            # A closed transport has no loop, so aborting it would fail.
            if writer.get_extra_info("socket").fileno() >= 0:
                writer.transport.abort()
            self._remove(connection)

    async def _exchange(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Read the request and write the answer. Raises ``TimeoutError`` if it arrives too late."""
        async with asyncio.timeout(REQUEST_S):
            request = await reader.readuntil(_END)
        connection.reading = False
        answer = await self.respond(request)
        with contextlib.suppress(OSError):
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        # One write for a small answer, because each one takes as much CPU as all the rest.
        writer.write(answer.head() + answer.body + answer.shared[:_SEND_BUFFER_BYTES])
        await writer.drain()
        for start in range(_SEND_BUFFER_BYTES, len(answer.shared), _SEND_BUFFER_BYTES):
            writer.write(answer.shared[start : start + _SEND_BUFFER_BYTES])
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    def _add(self, connection: _Connection) -> None:
        """Add a connection. If there are too many, close one of the address that has most.

        A connection whose request has not arrived is preferred, otherwise the oldest is closed.
        """
        self._open[connection.address][connection] = None
        self._count += 1
        if self._count > MAX_CONNECTIONS:
            crowded = max(self._open.values(), key=len)
            closed = next((each for each in crowded if each.reading), next(iter(crowded)))
            self._remove(closed)
            closed.task.cancel()

    def _remove(self, connection: _Connection) -> None:
        of_address = self._open.get(connection.address, {})
        if connection in of_address:
            del of_address[connection]
            self._count -= 1
            if not of_address:
                del self._open[connection.address]


def _report(_: asyncio.AbstractEventLoop, context: Mapping[str, object]) -> None:
    """Log errors of the event loop, such as no free descriptor for a new connection."""
    error = context.get("exception")
    if not isinstance(error, ConnectionError | TimeoutError):
        _log.error("port_failed", reason=str(context.get("message", "")), error=repr(error))
