"""What the agent serves itself: /metrics, /v1/report and /healthz, from the newest sample.

Nothing here measures: a scrape costs no driver call, and an agent without any extender or cluster
still serves. Label names are dcgm-exporter's (gpu, UUID, Hostname, modelName, GPU_I_ID), figures
are bytes.
"""

import socketserver
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from contract.gpunode import Device, GPUNodeStatus

_TEXT = "text/plain; charset=utf-8"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

#: Name, help, and where the figure is; -1 means absent and is left out.
_GAUGES: list[tuple[str, str, Callable[[Device], int]]] = [
    (
        "headroom_device_memory_bytes",
        "Physical memory, driver reserve included",
        lambda d: d.memory_bytes,
    ),
    ("headroom_device_reserved_bytes", "Kept by the driver", lambda d: d.reserved_bytes),
    ("headroom_device_used_bytes", "memory - free - reserved", lambda d: d.used_bytes),
    ("headroom_device_healthy", "1 where the device can be trusted", lambda d: int(d.healthy)),
]


class Board:
    """The newest status, shown by one thread and read by others."""

    def __init__(self, node: str, monotonic: Callable[[], float], stale_after_s: float) -> None:
        self.node = node
        self._monotonic = monotonic
        self._stale_after_s = stale_after_s
        #: Replaced as a whole, so a reader needs no lock.
        self._shown: tuple[GPUNodeStatus, float] | None = None

    def show(self, status: GPUNodeStatus) -> None:
        self._shown = (status, self._monotonic())

    @property
    def status(self) -> GPUNodeStatus | None:
        return None if self._shown is None else self._shown[0]

    @property
    def age_s(self) -> float | None:
        """Seconds since the newest sample; None before the first."""
        return None if self._shown is None else self._monotonic() - self._shown[1]

    @property
    def alive(self) -> bool:
        """Whether samples still come; a driver call that hangs does not stop them."""
        age_s = self.age_s
        return age_s is not None and age_s <= self._stale_after_s


class DeviceCollector(Collector):
    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        status, age_s = self._board.status, self._board.age_s
        if status is None or age_s is None:
            return
        yield GaugeMetricFamily(
            "headroom_agent_sample_age_seconds", "Age of the newest sample", value=age_s
        )
        labels = ["gpu", "UUID", "Hostname", "modelName", "GPU_I_ID"]
        for name, text, figure in _GAUGES:
            family = GaugeMetricFamily(name, text, labels=labels)
            for values, device in _by_memory(self._board.node, status.devices).items():
                if figure(device) >= 0:
                    family.add_metric(values, figure(device))
            yield family


def _by_memory(node: str, devices: list[Device]) -> dict[tuple[str, ...], Device]:
    """Label values -> device; once for compute instances that share a GPU instance's memory."""
    found: dict[tuple[str, ...], Device] = {}
    for device in devices:
        instance = "" if device.gpu_instance is None else str(device.gpu_instance)
        uuid = device.parent or device.uuid
        found.setdefault((str(device.index), uuid, node, device.model, instance), device)
    return found


class Server:
    """Serves ``board`` on ``host:port`` (0: any free port) from a thread of its own."""

    def __init__(self, board: Board, host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(DeviceCollector(board))

        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # seconds for one request; a silent client may not keep a thread

            def do_GET(self) -> None:
                match self.path.partition("?")[0]:
                    case "/metrics":
                        self._answer(200, _PROMETHEUS, generate_latest(registry))
                    case "/v1/report" if board.status is not None:
                        self._answer(200, "application/json", msgspec.json.encode(board.status))
                    case "/v1/report":
                        self._answer(503, _TEXT, b"no sample was taken yet\n")
                    case "/healthz" if board.alive:
                        self._answer(200, _TEXT, b"ok\n")
                    case "/healthz":
                        self._answer(503, _TEXT, b"no recent sample\n")
                    case _:
                        self._answer(404, _TEXT, b"try /metrics, /v1/report or /healthz\n")

            def _answer(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing: a line for each scrape would bury the others."""

        class Quiet(ThreadingHTTPServer):
            def server_bind(self) -> None:
                """Bind without asking DNS for our own name, as the base class would."""
                socketserver.TCPServer.server_bind(self)

            def handle_error(self, request: object, client_address: object) -> None:
                """Say nothing of clients that hang up: they are no event of ours."""

        self._server = Quiet((host, port), Handler)
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
