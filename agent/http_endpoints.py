"""HTTP endpoints of the agent: /metrics and /v1/gate for the cluster, health and the report.

No endpoint measures: a scrape causes no driver call. All of them work without extender and cluster,
except /v1/gate, which reads the API server, at most once a second.

There are two ports, so that no pod can delay the health probe. Every pod can reach the public port.
The local port listens on the loopback of the agent's network namespace. The probe in the container
can reach it, and so can ``kubectl port-forward`` and ``kubectl exec``, which the API server
authorises. The report names pods and processes of every tenant, so only the local port serves it.
"""

import re
import threading
import urllib.parse
from collections.abc import Callable, Mapping

import msgspec
from prometheus_client.registry import Collector

from agent.exposition import rendered
from agent.gate_decision import Verdict
from agent.http_port import Answer, HttpPort, Route
from agent.metrics import AgentCollector, Sample, SampleCollector
from contract.gpunode import GPUNodeStatus

_JSON = "application/json"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

LOCAL_HOST = "127.0.0.1"
#: Chosen for `curl --fail --retry`: it succeeds on 200, repeats on 503 and fails on 409.
GATE_STATUS = {"yes": 200, "not yet": 503, "no": 409}
_UID = re.compile(r"[0-9A-Za-z-]{1,64}")
_UID_EXAMPLE = "/v1/gate?pod_uid=0f3a1b2c-8d4e-4f5a-9b6c-7d8e9f0a1b2c"
_GATE_THREADS = 4


class LatestSample:
    """The newest sample. One thread writes it, others read it.

    ``stale_after_s`` is the age in seconds at which a sample is stale.
    """

    def __init__(self, node: str, monotonic: Callable[[], float], stale_after_s: float) -> None:
        self.node = node
        self.monotonic = monotonic
        self._stale_after_s = stale_after_s
        self._began_s = monotonic()
        #: Replaced as a whole, so a reader needs no lock.
        self._newest: tuple[GPUNodeStatus, Mapping[tuple[str, str], float], float] | None = None

    def set(
        self, status: GPUNodeStatus, pod_sm: Mapping[tuple[str, str], float] | None = None
    ) -> None:
        self._newest = (status, pod_sm or {}, self.monotonic())

    @property
    def shown(self) -> Sample | None:
        """The newest sample; None before the first one."""
        if self._newest is None:
            return None
        status, pod_sm, at_s = self._newest
        return Sample(self.node, status, self.monotonic() - at_s, pod_sm)

    @property
    def fresh(self) -> GPUNodeStatus | None:
        """The newest status; None if it is stale."""
        shown = self.shown
        return shown.status if shown is not None and shown.age_s <= self._stale_after_s else None

    @property
    def alive(self) -> bool:
        """Whether the newest sample is fresh; before the first one, whether it is not yet overdue.

        If false, a restart helps. A driver call that hangs does not stop samples, and would hang
        again in a new process.
        """
        since_s = self._began_s if self._newest is None else self._newest[2]
        return self.monotonic() - since_s <= self._stale_after_s


class _Metrics:
    """Renders the metrics: those of a sample once, whatever the number of scrapes.

    Any pod can scrape, and rendering the metrics of a sample takes most of the time of an answer.
    """

    def __init__(self, board: LatestSample, live: Collector) -> None:
        self._board = board
        self._lock = threading.Lock()
        self._live = live
        self._of_sample = SampleCollector(lambda: board.shown)
        #: The status whose metrics were rendered last, and the text.
        self._rendered: tuple[GPUNodeStatus | None, bytes] = (None, b"")

    def at_once(self, _: str) -> Answer | None:
        """Return the metrics if those of the newest sample were rendered, otherwise None."""
        status, of_sample = self._rendered
        if status is not self._newest:
            return None
        return Answer(200, rendered(self._live.collect()), _PROMETHEUS, of_sample)

    def answer(self, query: str) -> Answer:
        """Return the metrics, after those of the newest sample were rendered."""
        with self._lock:  # each port has a thread of its own
            if (answer := self.at_once(query)) is None:
                newest = self._newest  # a sample that comes now is rendered with the next call
                of_sample = rendered(self._of_sample.collect())
                self._rendered = newest, of_sample
                answer = Answer(200, rendered(self._live.collect()), _PROMETHEUS, of_sample)
            return answer

    @property
    def _newest(self) -> GPUNodeStatus | None:
        shown = self._board.shown
        return None if shown is None else shown.status


class Server:
    """Serves ``board`` on ``host:port``, and on ``local_port`` of the loopback (0: any free port).

    Raises ``OSError``.
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
    ) -> None:
        """Create both sockets; ``start`` begins to serve.

        ``ask`` decides whether the pod with a uid may start; None if there is no cluster. For
        ``writes`` and ``answers`` see ``AgentCollector``. ``stuck`` returns whether the agent has
        stopped answering the kubelet's calls.
        """
        self._board = board
        self._ask = ask
        self._stuck = stuck
        metrics = _Metrics(board, AgentCollector(lambda: board.shown, writes, answers))
        both = {
            "/healthz": Route(self._healthz),
            "/readyz": Route(self._readyz),
            "/metrics": Route(metrics.answer, threads=1, at_once=metrics.at_once),
        }
        public = {
            "/v1/gate": Route(self._gate, threads=_GATE_THREADS),
            "/v1/report": Route(self._no_report),
        }
        local = {"/v1/report": Route(self._report)}
        self._public = HttpPort("public", host, port, both | public)
        try:
            self._local = HttpPort("local", LOCAL_HOST, local_port, both | local)
        except OSError:
            self._public.stop()
            raise

    @property
    def port(self) -> int:
        return self._public.port

    @property
    def local_port(self) -> int:
        return self._local.port

    def start(self) -> None:
        self._public.start()
        self._local.start()

    def stop(self) -> None:
        self._public.stop()
        self._local.stop()

    def _healthz(self, _: str) -> Answer:
        if self._stuck():
            return Answer(503, b"the kubelet's calls are not answered\n")
        return Answer(200, b"ok\n") if self._board.alive else Answer(503, b"no recent sample\n")

    def _readyz(self, _: str) -> Answer:
        return _NO_SAMPLE if self._board.shown is None else Answer(200, b"ok\n")

    def _report(self, _: str) -> Answer:
        shown = self._board.shown
        if shown is None:
            return _NO_SAMPLE
        return Answer(200, msgspec.json.encode(shown.status), _JSON)

    def _no_report(self, _: str) -> Answer:
        example = f"kubectl -n headroom-system port-forward pod/NAME {self.local_port}"
        why = f"the report is served on the loopback only. Example: {example}\n"
        return Answer(403, why.encode())

    def _gate(self, query: str) -> Answer:
        uids = urllib.parse.parse_qs(query).get("pod_uid", [])
        if len(uids) != 1 or not _UID.fullmatch(uids[0]):
            why = f"pod_uid is not the uid of one pod. Example: {_UID_EXAMPLE}"
            return Answer(400, msgspec.json.encode({"error": why}), _JSON)
        if self._ask is None:
            verdict = Verdict("not yet", "this agent reports to no cluster")
        else:
            verdict = self._ask(uids[0])
        body = msgspec.json.encode({"answer": verdict.answer, "reason": verdict.reason})
        return Answer(GATE_STATUS[verdict.answer], body + b"\n", _JSON)


_NO_SAMPLE = Answer(503, b"no sample was taken yet\n")
