"""The HTTP endpoints of the agent. They serve /metrics and /v1/gate to the cluster, the health of
the agent, and its report.

No endpoint takes measurements, so a scrape causes no driver call. All endpoints work without an
extender and a cluster, except /v1/gate and /metrics on its own port, which send requests to the API
server.

There are three ports. Every pod can reach the public port, which serves gates. Metrics name the
pods of every tenant, so their port uses TLS and requires a token (``agent.metrics_access``). The
local port listens on the loopback of the agent's network namespace, so no pod can delay the health
probe. It can be reached by the probe in the container, and by ``kubectl port-forward`` and
``kubectl exec``, which the API server authorises. The report names processes too, so only the local
port serves it.
"""

import re
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from agent.gate_decision import Verdict
from agent.http_connection import Answer, Request
from agent.http_server import HttpPort, Route
from agent.metrics import AgentCollector, Sample, SampleCollector
from headroom.contract.gpunode import GPUNodeStatus

if TYPE_CHECKING:
    from agent.metrics_access import MetricsAccess
    from agent.serving_tls import ServingTls

_JSON = "application/json"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

LOCAL_HOST = "127.0.0.1"
#: HTTP status of each response, chosen for `curl --fail --retry`, which succeeds on 200, retries on
#: 503 and fails on 409.
GATE_STATUS = {"yes": 200, "not yet": 503, "no": 409}
_UID = re.compile(r"[0-9A-Za-z-]{1,64}")
_UID_EXAMPLE = "/v1/gate?pod_uid=0f3a1b2c-8d4e-4f5a-9b6c-7d8e9f0a1b2c"
_GATE_THREADS = 4
#: With a second thread, clients get metrics while the token of another client is reviewed.
_METRICS_THREADS = 2


class LatestSample:
    """The newest sample, written by one thread and read by others.

    ``stale_after_s`` is the age in seconds at which a sample becomes stale.
    """

    def __init__(self, node: str, monotonic: Callable[[], float], stale_after_s: float) -> None:
        self.node = node
        self.monotonic = monotonic
        self._stale_after_s = stale_after_s
        self._began_s = monotonic()
        #: The tuple is replaced as a whole, so readers need no lock.
        self._newest: tuple[GPUNodeStatus, Mapping[tuple[str, str], float], float] | None = None

    def set(
        self, status: GPUNodeStatus, pod_sm: Mapping[tuple[str, str], float] | None = None
    ) -> None:
        self._newest = (status, pod_sm or {}, self.monotonic())

    @property
    def shown(self) -> Sample | None:
        """The newest sample, or None before the first one."""
        if self._newest is None:
            return None
        status, pod_sm, at_s = self._newest
        return Sample(self.node, status, self.monotonic() - at_s, pod_sm)

    @property
    def fresh(self) -> GPUNodeStatus | None:
        """The newest status, or None if it is stale."""
        shown = self.shown
        return shown.status if shown is not None and shown.age_s <= self._stale_after_s else None

    @property
    def alive(self) -> bool:
        """Whether the newest sample is fresh or, before the first sample, that sample is not yet
        overdue.

        If this is false, a restart helps. A driver call that hangs does not make it false, because
        samples continue, and the call would hang in a new process too.
        """
        since_s = self._began_s if self._newest is None else self._newest[2]
        return self.monotonic() - since_s <= self._stale_after_s


class _Metrics:
    """Renders the metrics.

    The metrics of a sample are rendered only once, even if they are scraped several times, because
    rendering takes most of a response's time.
    """

    def __init__(self, board: LatestSample, live: Collector) -> None:
        self._board = board
        self._lock = threading.Lock()
        self._live, self._of_sample = CollectorRegistry(), CollectorRegistry()
        self._live.register(live)
        self._of_sample.register(SampleCollector(lambda: board.shown))
        #: The status whose metrics were rendered last, and the text.
        self._rendered: tuple[GPUNodeStatus | None, bytes] = (None, b"")

    def at_once(self, _: Request) -> Answer | None:
        """Return the metrics if the newest sample is already rendered, otherwise None."""
        status, of_sample = self._rendered
        if status is not self._newest:
            return None
        return Answer(200, generate_latest(self._live), _PROMETHEUS, of_sample)

    def answer(self, request: Request) -> Answer:
        """Render the newest sample if necessary, and return the metrics."""
        with self._lock:  # Each port has its own threads.
            if (answer := self.at_once(request)) is None:
                # The next call renders a sample that arrives from here on.
                newest = self._newest
                of_sample = generate_latest(self._of_sample)
                self._rendered = newest, of_sample
                answer = Answer(200, generate_latest(self._live), _PROMETHEUS, of_sample)
            return answer

    @property
    def _newest(self) -> GPUNodeStatus | None:
        shown = self._board.shown
        return None if shown is None else shown.status


class _Authorized:
    """Answers only clients that may read the metrics."""

    def __init__(self, metrics: _Metrics, access: "MetricsAccess") -> None:
        self._metrics, self._access = metrics, access

    def at_once(self, request: Request) -> Answer | None:
        """Return the response if it requires neither a review nor rendering, otherwise None."""
        rejection, known = self._access.at_once(request.token)
        if not known:
            return None
        if rejection is None and (answer := self._metrics.at_once(request)) is not None:
            return _kept_open(answer)
        return rejection

    def answer(self, request: Request) -> Answer:
        """Return the response."""
        return self._access.ask(request.token) or _kept_open(self._metrics.answer(request))


class MetricsPort(NamedTuple):
    """Address and certificate of the port that serves metrics over TLS, and who may read them."""

    host: str
    port: int
    tls: "ServingTls"
    #: Checks each client, or None if every client may read the metrics.
    access: "MetricsAccess | None"


class Server:
    """Serves ``board`` on ``host:port``, and on ``local_port`` of the loopback interface.

    Port 0 means any free port. Raises ``OSError`` if a port cannot be opened.
    """

    def __init__(
        self,
        board: LatestSample,
        host: str,
        port: int,
        local_port: int,
        ask: Callable[[str], Verdict] | None,
        writes: Mapping[tuple[str, str], int],
        answers: Mapping[tuple[str, str], int] | None = None,
        stuck: Callable[[], bool] = lambda: False,
        metrics_port: MetricsPort | None = None,
        open_metrics: bool = False,
    ) -> None:
        """Create the sockets. ``start`` begins to serve requests.

        ``ask`` decides whether the pod with a uid may start, and is None if there is no cluster.
        ``AgentCollector`` describes ``writes`` and ``answers``. ``stuck`` returns whether the agent
        has stopped answering the kubelet's calls. With ``open_metrics``, the public port serves
        metrics to every client.
        """
        self._board = board
        self._ask = ask
        self._stuck = stuck
        metrics = _Metrics(board, AgentCollector(lambda: board.shown, writes, answers))
        both = {"/healthz": Route(self._healthz), "/readyz": Route(self._readyz)}
        of_all = {"/metrics": Route(metrics.answer, threads=1, at_once=metrics.at_once)}
        public = {
            "/v1/gate": Route(self._gate, threads=_GATE_THREADS),
            "/v1/report": Route(self._no_report),
            "/metrics": Route(self._no_metrics),
        }
        local = {"/v1/report": Route(self._report)}
        self._ports: list[HttpPort] = []
        self._metrics: HttpPort | None = None
        try:
            self._public = self._open(
                HttpPort("public", host, port, both | public | (of_all if open_metrics else {}))
            )
            self._local = self._open(
                HttpPort("local", LOCAL_HOST, local_port, both | of_all | local)
            )
            if metrics_port is not None:
                access = metrics_port.access
                self._metrics = self._open(
                    HttpPort(
                        "metrics",
                        metrics_port.host,
                        metrics_port.port,
                        {"/metrics": _authorized(metrics, access)} if access else of_all,
                        metrics_port.tls.context,
                    )
                )
        except OSError:
            self.stop()
            raise

    def _open(self, port: HttpPort) -> HttpPort:
        """Remember the port, so that ``stop`` closes it."""
        self._ports.append(port)
        return port

    @property
    def port(self) -> int:
        return self._public.port

    @property
    def local_port(self) -> int:
        return self._local.port

    @property
    def metrics_port(self) -> int | None:
        """The port that serves metrics over TLS, or None if there is none."""
        return self._metrics.port if self._metrics else None

    def start(self) -> None:
        for port in self._ports:
            port.start()

    def stop(self) -> None:
        for port in self._ports:
            port.stop()

    def _healthz(self, _: Request) -> Answer:
        if self._stuck():
            return Answer(503, b"the kubelet's calls are not answered\n")
        return Answer(200, b"ok\n") if self._board.alive else Answer(503, b"no recent sample\n")

    def _readyz(self, _: Request) -> Answer:
        return _NO_SAMPLE if self._board.shown is None else Answer(200, b"ok\n")

    def _report(self, _: Request) -> Answer:
        shown = self._board.shown
        if shown is None:
            return _NO_SAMPLE
        return Answer(200, msgspec.json.encode(shown.status), _JSON)

    def _no_report(self, _: Request) -> Answer:
        example = f"kubectl -n headroom-system port-forward pod/NAME {self.local_port}"
        why = f"the report is served on the loopback only. Example: {example}\n"
        return Answer(403, why.encode())

    def _no_metrics(self, _: Request) -> Answer:
        return Answer(403, _NO_METRICS)

    def _gate(self, request: Request) -> Answer:
        uids = urllib.parse.parse_qs(request.query).get("pod_uid", [])
        if len(uids) != 1 or not _UID.fullmatch(uids[0]):
            why = f"pod_uid is not the uid of one pod. Example: {_UID_EXAMPLE}"
            return Answer(400, msgspec.json.encode({"error": why}), _JSON)
        if self._ask is None:
            verdict = Verdict("not yet", "this agent reports to no cluster")
        else:
            verdict = self._ask(uids[0])
        body = msgspec.json.encode({"answer": verdict.answer, "reason": verdict.reason})
        return Answer(GATE_STATUS[verdict.answer], body + b"\n", _JSON)


def _authorized(metrics: _Metrics, access: "MetricsAccess") -> Route:
    authorized = _Authorized(metrics, access)
    return Route(authorized.answer, threads=_METRICS_THREADS, at_once=authorized.at_once)


def _kept_open(answer: Answer) -> Answer:
    """Keep the connection of an authorized client open, which saves a handshake at the next
    scrape."""
    return replace(answer, keeps_open=True)


_NO_METRICS = (
    b"metrics are served over TLS on another port (--metrics-listen) to clients with a token; "
    b"to serve them here to every client: --metrics-access open\n"
)
_NO_SAMPLE = Answer(503, b"no sample was taken yet\n")
