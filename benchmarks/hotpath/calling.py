"""Makes the calls of kube-scheduler, and summarizes their durations."""

import http.client
import socket
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from benchmarks.hotpath.bodies import JSON

#: Seconds of idle time after which servers close connections. uvicorn waits 5 s.
_IDLE_S = 3.0


class Caller:
    """One connection, which is kept open as by Go's HTTP client."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._connect()

    def _connect(self) -> None:
        self._connection.close()
        self._connection.connect()
        # Go does the same. Otherwise, the time that the kernel waits to fill a packet would count.
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._used_s = time.monotonic()

    def post(self, what: str, body: bytes = b"") -> tuple[bytes, int]:
        """Return the answer, and the nanoseconds that it took."""
        return self._timed("POST", what, body)

    def patch(self, what: str, body: bytes) -> tuple[bytes, int]:
        return self._timed("PATCH", what, body)

    def get(self, what: str) -> tuple[bytes, int]:
        return self._timed("GET", what, b"")

    def _timed(self, method: str, what: str, body: bytes) -> tuple[bytes, int]:
        if time.monotonic() > self._used_s + _IDLE_S:
            self._connect()
        began = time.perf_counter_ns()
        self._connection.request(method, f"/{what}", body, {"Content-Type": JSON})
        answer = self._connection.getresponse().read()
        took_ns = time.perf_counter_ns() - began
        self._used_s = time.monotonic()
        return answer, took_ns

    def close(self) -> None:
        self._connection.close()


class Spread(msgspec.Struct, frozen=True):
    """The spread of many durations."""

    p50_ms: float
    p99_ms: float
    max_ms: float


def spread(took_ns: Sequence[int]) -> Spread:
    return Spread(*(round(float(q) / 1e6, 4) for q in np.percentile(took_ns, [50, 99, 100])))
