"""An HTTP server for GET requests, in which no client can block another.

One thread serves all connections, so a slow client occupies only its connection. A route that may
block has its own threads, so it does not delay other routes. Each connection has limits in bytes
and seconds. If there are more than ``MAX_CONNECTIONS``, the server closes a connection of the
address with the most connections.

With TLS, a response can keep the connection open, and each address may open only a few connections
per second, because a handshake takes more CPU than a response.

Requests have to be cheap, because any pod can send them. This server uses ``selectors``, because
asyncio's event loop takes several times as much CPU per request as the system calls.
"""

import contextlib
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import TypeVar

import structlog

from agent.http_connection import Answer, Connection, Request
from agent.rate_limit import RateLimit
from headroom.system.listening import listening_socket

_log = structlog.get_logger()

MAX_CONNECTIONS = 256
#: Number of seconds within which the TLS handshake must be complete and the request must arrive.
REQUEST_S = 5.0
#: Seconds within which the next request must arrive on a connection that stays open. Prometheus
#: scrapes at least once a minute.
IDLE_S = 90.0
#: Seconds after which a connection is closed if the client has not read the response.
CONNECTION_S = 30.0
#: Maximum number of TLS connections that an address may open per second, and maximum number in a
#: burst. A handshake takes 0.9 ms of CPU. Prometheus keeps its connection open.
HANDSHAKES_PER_S, HANDSHAKES_AT_ONCE = 1.0, 10
#: Size of the kernel's buffer for the part of a response that the client has not read.
_SEND_BUFFER_BYTES = 64 << 10
#: Maximum number of connections that wait to be accepted.
_BACKLOG = 1024
#: Maximum number of connections that are accepted in one step.
_ACCEPT_AT_ONCE = 64
#: Number of seconds for which no connection is accepted after ``accept`` has failed, for example
#: because no file descriptor was free.
_PAUSE_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Route:
    answer: Callable[[Request], Answer]
    #: Number of threads if the route may block, or 0 if it never blocks.
    threads: int = 0
    #: A function that returns the response if it can compute the response without blocking. If the
    #: function returns None, a thread computes the response. A thread costs more CPU than a small
    #: response.
    at_once: Callable[[Request], Answer | None] = lambda request: None


class _Threads:
    """The threads of a route that may block.

    Unlike the threads of an executor they are daemons, so a blocked thread does not keep the
    process from exiting.
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
            if future.set_running_or_notify_cancel():  # false if the connection was closed
                future.set_result(work())


class HttpPort:
    """Serves ``routes`` on ``host:port``.

    ``routes`` maps paths to routes. Port 0 means any free port, and host ``::`` accepts IPv4 too.
    ``tls`` returns the TLS context of a new connection, or None to close the connection. Without
    ``tls`` the port serves plain HTTP, and reads no tokens.

    The constructor raises ``OSError`` if the port cannot be opened.
    """

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        routes: Mapping[str, Route],
        tls: Callable[[], ssl.SSLContext | None] | None = None,
    ) -> None:
        self._tls = tls
        self._handshakes = RateLimit(HANDSHAKES_PER_S, HANDSHAKES_AT_ONCE, time.monotonic)
        self._socket = listening_socket(host, port, _BACKLOG)
        self._socket.setblocking(False)
        # Accepted connections inherit this option from the listening socket.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self.port: int = self._socket.getsockname()[1]
        self._routes = routes
        self._threads = {
            path: _Threads(f"{name}{path}", route.threads)
            for path, route in routes.items()
            if route.threads
        }
        #: The open connections, oldest first.
        self._connections: dict[Connection, None] = {}
        #: Connections whose response a thread has computed.
        self._answered = SimpleQueue[Connection]()
        #: Time on the monotonic clock until which no connection is accepted, or 0 while accepting.
        self._paused_until_s = 0.0
        self._stopping = False
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector = DefaultSelector()
        self._selector.register(self._woken, EVENT_READ, self._send_answered)
        self._selector.register(self._socket, EVENT_READ, self._accept)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        if self._thread.is_alive():
            self._wake()
            self._thread.join()
        for connection in [*self._connections]:
            self._close(connection)
        self._selector.close()
        for sock in (self._socket, self._woken, self._waker):
            sock.close()
        for threads in self._threads.values():
            threads.close()

    def respond(self, request: bytes) -> Answer | Future[Answer]:
        """Return the response to a request, or the future response if a thread computes it.

        ``request`` contains the request line and the headers.
        """
        line, _, headers = request.partition(b"\r\n")
        try:
            method, target, _ = line.decode("ascii").split(" ")
        except ValueError:
            return Answer(400, b"not a request; example: GET /healthz HTTP/1.1\n")
        path, _, query = target.partition("?")
        route = self._routes.get(path)
        if route is None:
            return Answer(404, f"not found; try {', '.join(self._routes)}\n".encode())
        if method != "GET":
            return Answer(405, b"only GET is answered\n")
        asked = Request(query, _token(headers) if self._tls else "")
        determine = partial(_safely, path, route.answer, asked)
        if (threads := self._threads.get(path)) is None:
            return determine()
        return _safely(path, route.at_once, asked) or threads.give(determine)

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(self._next_deadline_in_s()):
                key.data()
            now_s = time.monotonic()
            for connection in [c for c in self._connections if c.deadline_s <= now_s]:
                self._close(connection)
            if self._paused_until_s and self._paused_until_s <= now_s:
                self._paused_until_s = 0.0
                self._selector.register(self._socket, EVENT_READ, self._accept)

    def _next_deadline_in_s(self) -> float | None:
        """Return the number of seconds until the next deadline, or None if there is no deadline."""
        deadlines_s = [connection.deadline_s for connection in self._connections]
        if self._paused_until_s:
            deadlines_s.append(self._paused_until_s)
        return max(0.0, min(deadlines_s) - time.monotonic()) if deadlines_s else None

    def _accept(self) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                sock, peer = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as err:
                _log.error("port_failed", reason=str(err))
                self._selector.unregister(self._socket)
                self._paused_until_s = time.monotonic() + _PAUSE_S
                return
            sock.setblocking(False)
            if (connected := self._over_tls(sock, peer[0])) is None:
                sock.close()
                continue
            connection = Connection(connected, peer[0], time.monotonic() + REQUEST_S)
            self._connections[connection] = None
            if len(self._connections) > MAX_CONNECTIONS:
                self._close(self._one_too_many())
            self._proceed(connection)

    def _over_tls(self, sock: socket.socket, address: str) -> socket.socket | None:
        """Return the socket to use, or None if the connection must be closed."""
        if self._tls is None:
            return sock
        if not self._handshakes.allows(address) or (context := self._tls()) is None:
            return None
        try:
            # The parts of a response are sent separately, and the next part must not wait for an
            # ACK.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except (OSError, ValueError):  # the client has closed the connection
            return None

    def _one_too_many(self) -> Connection:
        """Return a connection of the address with the most connections.

        A connection whose request has not arrived is preferred. Otherwise the oldest connection is
        returned.
        """
        counts = Counter(connection.address for connection in self._connections)
        crowded, _ = counts.most_common(1)[0]
        of_crowded = [each for each in self._connections if each.address == crowded]
        return next((each for each in of_crowded if each.reading), of_crowded[0])

    def _proceed(self, connection: Connection) -> None:
        """Read or write as far as possible without blocking, and close the connection when it
        ends."""
        try:
            while self._answers_one(connection):
                pass
        except BlockingIOError:
            self._wait(connection, EVENT_READ if connection.reading else EVENT_WRITE)
        except ssl.SSLWantReadError:
            self._wait(connection, EVENT_READ)
        except ssl.SSLWantWriteError:
            self._wait(connection, EVENT_WRITE)
        # the client closed the connection or sent too much, or there was an ssl.SSLError
        except OSError:
            self._close(connection)

    def _answers_one(self, connection: Connection) -> bool:
        """Answer one request, and return whether to continue with the next one.

        Raises ``OSError`` like ``Connection``.
        """
        if connection.reading:
            answer = self.respond(connection.read())
            connection.deadline_s = time.monotonic() + CONNECTION_S - REQUEST_S
            if isinstance(answer, Future):
                connection.reading = False
                self._wait(connection, 0)
                connection.future = answer
                answer.add_done_callback(lambda _: self._take_answer(connection))
                return False
            connection.begin(answer)
        connection.write()
        if not connection.keeps_open:
            self._close(connection)
            return False
        connection.reading, connection.future = True, None
        connection.deadline_s = time.monotonic() + IDLE_S
        return True

    def _wait(self, connection: Connection, events: int) -> None:
        """Continue with the connection when one of ``events`` occurs. With 0, the selector ignores
        it."""
        if events == connection.events:
            return
        if connection.events:
            self._selector.unregister(connection.sock)
        if events:
            self._selector.register(connection.sock, events, partial(self._proceed, connection))
        connection.events = events

    def _close(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        del self._connections[connection]
        if connection.future is not None:
            connection.future.cancel()
        self._wait(connection, 0)
        connection.sock.close()

    def _take_answer(self, connection: Connection) -> None:
        """Pass a response to the server's thread, which sends it. The threads of routes call this
        method.
        """
        self._answered.put(connection)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the server is awake already, or has stopped
            self._waker.send(b"\0")

    def _send_answered(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(MAX_CONNECTIONS)
        while not self._answered.empty():
            connection = self._answered.get()
            if connection in self._connections and connection.future is not None:
                connection.begin(connection.future.result())
                self._proceed(connection)


def _token(headers: bytes) -> str:
    """Return the bearer token of the request's headers, or an empty string if there is none."""
    for line in headers.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"authorization":
            scheme, _, token = value.strip().partition(b" ")
            return token.strip().decode("latin-1") if scheme.lower() == b"bearer" else ""
    return ""


def _safely(path: str, answer: Callable[[Request], T], request: Request) -> T | Answer:
    """Return the response. If computing it fails, log the error and return a 500."""
    try:
        return answer(request)
    except Exception:  # noqa: BLE001 - a failed request must not affect others
        _log.exception("answer_failed", path=path)
        return Answer(500, b"the agent could not answer; its log has the error\n")
