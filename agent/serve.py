"""What the agent serves itself: /metrics, /v1/report, /v1/gate, /healthz and /readyz.

Nothing here measures: a scrape costs no driver call, and an agent without any extender or cluster
still serves. Only /v1/gate asks anybody, the API server, and seldom.

Any pod that reaches the port may ask. The report names the pods and processes of every tenant, so
it is given to clients over loopback only: to ``kubectl port-forward`` and ``kubectl exec``, which
the API server has authorised.
"""

import contextlib
import ipaddress
import re
import socket
import socketserver
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO

import msgspec
import structlog
from prometheus_client import CollectorRegistry, generate_latest

from agent.gate import Verdict
from agent.metrics import AgentCollector, Shown
from contract.gpunode import GPUNodeStatus

_log = structlog.get_logger()

_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

#: To `curl --fail --retry`: start; ask again; give up, until the kubelet runs it anew.
GATE_STATUS = {"yes": 200, "not yet": 503, "no": 409}
_UID = re.compile(r"[0-9A-Za-z-]{1,64}")
_UID_EXAMPLE = "/v1/gate?pod_uid=0f3a1b2c-8d4e-4f5a-9b6c-7d8e9f0a1b2c"


#: Served at once; each costs a thread.
MOST_CLIENTS = 64
_ANSWERED = object()
#: Seconds that one may take from its first byte to its answer.
CLIENT_S = 30.0
#: Request line and headers of one request; it has no body.
MAX_REQUEST_BYTES = 16 << 10

_LOCAL_ONLY = (
    b"the report is given over loopback only; "
    b"example: kubectl -n headroom-system port-forward pod/NAME 9410, "
    b"then localhost:9410/v1/report\n"
)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


class Board:
    """The newest sample, shown by one thread and read by others."""

    def __init__(self, node: str, monotonic: Callable[[], float], stale_after_s: float) -> None:
        self.node = node
        self._monotonic = monotonic
        self._stale_after_s = stale_after_s
        self._began_s = monotonic()
        #: Replaced as a whole, so a reader needs no lock.
        self._newest: tuple[GPUNodeStatus, Mapping[tuple[str, str], float], float] | None = None

    def show(
        self, status: GPUNodeStatus, pod_sm: Mapping[tuple[str, str], float] | None = None
    ) -> None:
        self._newest = (status, pod_sm or {}, self._monotonic())

    @property
    def shown(self) -> Shown | None:
        """None before the first sample."""
        if self._newest is None:
            return None
        status, pod_sm, at_s = self._newest
        return Shown(self.node, status, self._monotonic() - at_s, pod_sm)

    @property
    def fresh(self) -> GPUNodeStatus | None:
        """The newest status; None where it is too old to go by."""
        shown = self.shown
        return shown.status if shown is not None and shown.age_s <= self._stale_after_s else None

    @property
    def alive(self) -> bool:
        """False only where a restart helps: no samples come, nor the first one in its time.

        A driver call that hangs does not stop them, and would hang again in the next process.
        """
        since_s = self._began_s if self._newest is None else self._newest[2]
        return self._monotonic() - since_s <= self._stale_after_s


class _Limited:
    """Reads at most ``MAX_REQUEST_BYTES`` from a client."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left_bytes = MAX_REQUEST_BYTES

    def readline(self, limit: int) -> bytes:
        line = self._file.readline(min(limit, self._left_bytes + 1))
        self._left_bytes -= len(line)
        if self._left_bytes < 0:
            raise ConnectionAbortedError(f"the request is longer than {MAX_REQUEST_BYTES} bytes")
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Server:
    """Serves ``board`` on ``host:port`` (0: any free port) from a thread of its own."""

    def __init__(
        self,
        board: Board,
        host: str,
        port: int,
        ask: Callable[[str], Verdict] | None,
        writes: Mapping[tuple[str, str], int],
        answers: Mapping[tuple[str, str], int] | None = None,
        stuck: Callable[[], bool] = lambda: False,
    ) -> None:
        """``ask`` answers for the pod of a uid; None where there is no cluster. ``stuck``: whether
        the kubelet's calls for devices are not answered any more."""
        registry = CollectorRegistry()
        registry.register(AgentCollector(lambda: board.shown, writes, answers))

        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # seconds for one request; a silent client may not keep a thread

            def setup(self) -> None:
                super().setup()
                self.rfile: Any = _Limited(self.rfile)

            def do_GET(self) -> None:
                quiet.reading.pop(self.request, None)
                path, _, query = self.path.partition("?")
                shown = board.shown
                match path:
                    case "/metrics":
                        self._answer(200, _PROMETHEUS, generate_latest(registry))
                    case "/readyz" if shown is not None:
                        self._answer(200, _TEXT, b"ok\n")
                    case "/readyz":
                        self._answer(503, _TEXT, b"no sample was taken yet\n")
                    case "/v1/report" if not _is_loopback(self.client_address[0]):
                        self._answer(403, _TEXT, _LOCAL_ONLY)
                    case "/v1/report" if shown is not None:
                        self._answer(200, _JSON, msgspec.json.encode(shown.status))
                    case "/v1/report":
                        self._answer(503, _TEXT, b"no sample was taken yet\n")
                    case "/v1/gate":
                        self._gate(query)
                    case "/healthz" if stuck():
                        self._answer(503, _TEXT, b"the kubelet's calls are not answered\n")
                    case "/healthz" if board.alive:
                        self._answer(200, _TEXT, b"ok\n")
                    case "/healthz":
                        self._answer(503, _TEXT, b"no recent sample\n")
                    case _:
                        known = b"try /metrics, /v1/report, /v1/gate, /healthz or /readyz\n"
                        self._answer(404, _TEXT, known)

            def _gate(self, query: str) -> None:
                uids = urllib.parse.parse_qs(query).get("pod_uid", [])
                if len(uids) != 1 or not _UID.fullmatch(uids[0]):
                    why = f"pod_uid is not one uid of a pod; right is, for example, {_UID_EXAMPLE}"
                    self._answer(400, _JSON, msgspec.json.encode({"error": why}))
                    return
                if ask is None:
                    verdict = Verdict("not yet", "this agent reports to no cluster")
                else:
                    verdict = ask(uids[0])
                body = msgspec.json.encode({"answer": verdict.answer, "reason": verdict.reason})
                self._answer(GATE_STATUS[verdict.answer], _JSON, body + b"\n")

            def _answer(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing: a line for each scrape would bury the others."""

        class Quiet(ThreadingHTTPServer):
            # The kernel drops connections beyond this number; their clients retry after a second.
            request_queue_size = MOST_CLIENTS

            def __init__(self) -> None:
                #: Connections that are being served, and since when.
                self.open: dict[socket.socket, float] = {}
                #: Those whose request has not come whole, the earliest first.
                self.reading: dict[socket.socket, None] = {}
                super().__init__((host, port), Handler)

            def process_request(self, request: Any, client_address: Any) -> None:
                """If there are too many, the one that has sent no request for longest is dropped:
                a client that asks at once is answered."""
                if len(self.open) >= MOST_CLIENTS and not self._make_room():
                    self.shutdown_request(request)  # who is refused asks again
                    return
                self.open[request] = time.monotonic()
                self.reading[request] = None
                super().process_request(request, client_address)

            def _make_room(self) -> bool:
                """False if all are being answered."""
                for earliest in list(self.reading):
                    if self.reading.pop(earliest, _ANSWERED) is None:
                        self.open.pop(earliest, None)
                        with contextlib.suppress(OSError):
                            earliest.shutdown(socket.SHUT_RDWR)
                        return True
                return False

            def shutdown_request(self, request: Any) -> None:
                self.open.pop(request, None)
                self.reading.pop(request, None)
                super().shutdown_request(request)

            def service_actions(self) -> None:
                """Called twice a second: a client that sends drop by drop is never silent."""
                for request, since_s in list(self.open.items()):
                    if time.monotonic() - since_s > CLIENT_S:
                        with contextlib.suppress(OSError):
                            request.shutdown(socket.SHUT_RDWR)

            def server_bind(self) -> None:
                """Bind without asking DNS for our own name, as the base class would."""
                socketserver.TCPServer.server_bind(self)

            def handle_error(self, request: object, client_address: object) -> None:
                """Say nothing of clients that hang up or stop: they are no event of ours."""
                if not isinstance(sys.exception(), ConnectionError | TimeoutError):
                    _log.exception("answer_failed")

        self._server = quiet = Quiet()
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
