"""An HTTP server for GET requests on which no client can block others.

One thread serves all connections, so a slow client costs only its connection. A route that may
block has its own threads, so it does not delay other routes. Bytes and seconds of each connection
are limited. If there are more than ``MAX_CONNECTIONS``, the address with the most connections loses
one.

Any pod can send requests, so they have to be cheap. The event loop of asyncio takes several times
as much CPU for a request as its system calls. So this server uses ``selectors``.
"""

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from queue import SimpleQueue
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from typing import TypeVar

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
#: Maximum number of connections that are accepted in one step.
_ACCEPT_AT_ONCE = 64
#: Seconds without new connections after the kernel could not accept one, such as for lack of
#: descriptors.
_PAUSE_S = 1.0
_END = b"\r\n\r\n"

T = TypeVar("T")

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
            if future.set_running_or_notify_cancel():  # otherwise the connection was closed
                future.set_result(work())


@dataclass(eq=False, slots=True)
class _Connection:
    sock: socket.socket
    #: Address of the client.
    address: str
    #: Time on the monotonic clock at which the connection is closed.
    deadline_s: float
    #: Whether the request has not arrived completely.
    reading: bool = True
    request: bytes = b""
    #: The answer, if a thread determines it.
    future: Future[Answer] | None = None
    #: The parts of the answer that have not been sent.
    unsent: list[memoryview] = field(default_factory=list)
    #: Events that the selector waits for, such as ``EVENT_READ``; 0: none.
    events: int = 0

    def read(self) -> bool:
        """Read what has arrived; return whether the request is complete. Raises ``OSError``."""
        try:
            part = self.sock.recv(MAX_REQUEST_BYTES)
        except BlockingIOError:
            return False
        self.request += part
        if _END in self.request:
            return True
        if not part or len(self.request) >= MAX_REQUEST_BYTES:
            raise ConnectionError("the request is not complete, or too long")
        return False

    def begin(self, answer: Answer) -> None:
        self.unsent = [memoryview(answer.head() + answer.body), memoryview(answer.shared)]

    def write(self) -> bool:
        """Send what the kernel takes; return whether it was everything. Raises ``OSError``."""
        try:
            sent_bytes = self.sock.sendmsg(self.unsent)
        except BlockingIOError:
            return False
        unsent, self.unsent = self.unsent, []
        for part in unsent:
            if sent_bytes < len(part):
                self.unsent.append(part[sent_bytes:])
            sent_bytes = max(0, sent_bytes - len(part))
        return not self.unsent


class HttpPort:
    """Serves ``routes`` (path -> route) on ``host:port`` (0: any free port; ``::``: IPv4 too).

    The constructor raises ``OSError`` if the port cannot be opened.
    """

    def __init__(self, name: str, host: str, port: int, routes: Mapping[str, Route]) -> None:
        self._socket = listening_socket(host, port, _BACKLOG)
        self._socket.setblocking(False)
        # Accepted connections inherit it.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self.port: int = self._socket.getsockname()[1]
        self._routes = routes
        self._threads = {
            path: _Threads(f"{name}{path}", route.threads)
            for path, route in routes.items()
            if route.threads
        }
        #: The open connections, oldest first.
        self._connections: dict[_Connection, None] = {}
        #: Connections whose answer a thread has determined.
        self._answered = SimpleQueue[_Connection]()
        #: Time on the monotonic clock until which no connection is accepted; 0: accepting.
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
        """Return the answer to a request, given as request line and headers, or its future."""
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
        determine = partial(_safely, path, route.answer, query)
        if (threads := self._threads.get(path)) is None:
            return determine()
        return _safely(path, route.at_once, query) or threads.give(determine)

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
        """Return the seconds until a deadline; None if there is none."""
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
            connection = _Connection(sock, peer[0], time.monotonic() + REQUEST_S)
            self._connections[connection] = None
            if len(self._connections) > MAX_CONNECTIONS:
                self._close(self._one_too_many())
            self._proceed(connection)

    def _one_too_many(self) -> _Connection:
        """Return a connection of the address that has most.

        One whose request has not arrived is preferred, otherwise it is the oldest.
        """
        counts = Counter(connection.address for connection in self._connections)
        crowded, _ = counts.most_common(1)[0]
        of_crowded = [each for each in self._connections if each.address == crowded]
        return next((each for each in of_crowded if each.reading), of_crowded[0])

    def _proceed(self, connection: _Connection) -> None:
        """Read or write as far as possible without waiting; close the connection at its end."""
        try:
            if connection.reading:
                if not connection.read():
                    self._wait(connection, EVENT_READ)
                    return
                connection.reading = False
                connection.deadline_s += CONNECTION_S - REQUEST_S
                answer = self.respond(connection.request)
                if isinstance(answer, Future):
                    self._wait(connection, 0)
                    connection.future = answer
                    answer.add_done_callback(lambda _: self._take_answer(connection))
                    return
                connection.begin(answer)
            if not connection.write():
                self._wait(connection, EVENT_WRITE)
                return
        except OSError:
            pass  # the client closed the connection, or sent too much
        self._close(connection)

    def _wait(self, connection: _Connection, events: int) -> None:
        """Proceed with a connection once one of ``events`` occurs; 0: with none."""
        if events == connection.events:
            return
        if connection.events:
            self._selector.unregister(connection.sock)
        if events:
            self._selector.register(connection.sock, events, partial(self._proceed, connection))
        connection.events = events

    def _close(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return
        del self._connections[connection]
        if connection.future is not None:
            connection.future.cancel()
        self._wait(connection, 0)
        connection.sock.close()

    def _take_answer(self, connection: _Connection) -> None:
        """Let the server's thread send an answer; called by the thread of a route."""
        self._answered.put(connection)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is awake already, or has ended
            self._waker.send(b"\0")

    def _send_answered(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(MAX_CONNECTIONS)
        while not self._answered.empty():
            connection = self._answered.get()
            if connection in self._connections and connection.future is not None:
                connection.begin(connection.future.result())
                self._proceed(connection)


def _safely(path: str, answer: Callable[[str], T], query: str) -> T | Answer:
    """Return the answer; if that fails, log it and return a 500."""
    try:
        return answer(query)
    except Exception:  # noqa: BLE001 - a failed request must not affect others
        _log.exception("answer_failed", path=path)
        return Answer(500, b"the agent could not answer; its log has the error\n")
