"""Simulates the API server of a busy fleet: lists objects, and sends watch events about reports.

The benchmark sets the rate of the reports. Writes are accepted but not stored. The server listens
on the loopback, in its own process, and is controlled through a pipe."""

import contextlib
import itertools
import queue
import random
import threading
import time
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from benchmarks.hotpath.bodies import SEED
from benchmarks.hotpath.fleet import MIB, Fleet, encoded, now
from headroom.contract import annotations
from headroom.contract.gpunode import GROUP, PLURAL, VERSION
from headroom.contract.heartbeat import Confirmation, encode_confirmation
from headroom.contract.kube import ObjectMeta

GPUNODES = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
NODES, PODS = "/api/v1/nodes", "/api/v1/pods"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/headroom-system/leases"
#: Seconds between two heartbeats of an agent, and number of pods that change per second.
_HEARTBEATS_EVERY_S, _PODS_PER_S = 30.0, 50.0
_TICK_S = 0.01
#: Placeholders for the values that differ in each version. They have the same length as the values.
_VERSION, _OBSERVED_AT = "0000000000", "2000-01-01T00:00:00.000+00:00"


class Order(msgspec.Struct):
    """Sets the number of reports per second from now on. With ``burst``, all nodes also report
    now."""

    reports_per_s: float = 0.0
    burst: bool = False
    #: Whether heartbeats are sent and pods change.
    others: bool = False
    #: Whether to answer only after the watches have sent everything.
    drain: bool = False


class Feed:
    """The lists and watch events of a fleet."""

    def __init__(self, nodes: int, pods_per_device: int) -> None:
        self._fleet = Fleet(nodes, pods_per_device)
        self._random = random.Random(SEED)
        self._version = itertools.count(1)
        #: Kind whose objects change -> a queue for each watch.
        self._sent: dict[str, list[queue.Queue[bytes]]] = {GPUNODES: [], LEASES: [], PODS: []}
        names = self._fleet.names
        #: Reports of each node: with the initial use of its pods, and after the use has grown.
        self._reports = [[self._template(name, grown) for name in names] for grown in (0, 1, 2)]
        self._pods = [
            msgspec.json.encode(msgspec.structs.replace(pod, metadata=_versioned(pod.metadata)))
            for name in names
            for pod in self._fleet.kube_pods(name)
        ]
        self._stamps = dict.fromkeys(names, now())
        self._next = itertools.cycle(range(nodes))
        self._phase = 0

    def _template(self, name: str, grown: int) -> bytes:
        gpunode = self._fleet.gpunode(name)
        status = msgspec.structs.replace(
            self._fleet.status(name, grown * 256 * MIB), observed_at=_OBSERVED_AT
        )
        metadata = _versioned(gpunode.metadata)
        return encoded(msgspec.structs.replace(gpunode, metadata=metadata, status=status))

    def listed(self, path: str) -> bytes:
        return _list(self._items(path))

    def pods_on(self, node: str) -> bytes:
        """Return the list of the pods on a node."""
        return _list(map(msgspec.json.encode, self._fleet.kube_pods(node)))

    def _items(self, path: str) -> Iterator[bytes]:
        if path == GPUNODES:
            for index, name in enumerate(self._fleet.names):
                yield self._filled(self._reports[0][index], self._stamps[name])
        elif path == NODES:
            for name in self._fleet.names:
                yield msgspec.json.encode(self._fleet.kube_node(name))
        elif path == PODS:
            for pod in self._pods:
                yield self._filled(pod, "")
        elif path == LEASES:
            for name in self._fleet.names:
                yield self._lease(name)

    def _filled(self, template: bytes, stamp: str) -> bytes:
        version = f"{next(self._version):010d}".encode()
        whole = template.replace(_VERSION.encode(), version, 1)
        return whole.replace(_OBSERVED_AT.encode(), stamp.encode(), 1) if stamp else whole

    def _lease(self, name: str) -> bytes:
        vouch = Confirmation(
            sampled_at=now(), gpunode=f"gpunode-{name}", observed_at=self._stamps[name]
        )
        metadata = {
            "name": name,
            "namespace": "headroom-system",
            "resourceVersion": str(next(self._version)),
            "annotations": {annotations.OBSERVED_AT: encode_confirmation(vouch)},
        }
        return msgspec.json.encode({"metadata": metadata, "spec": {"renewTime": now()}})

    def written(self, name: str) -> bytes:
        """Return the answer to a write that requests only metadata."""
        metadata = self._fleet.gpunode(name).metadata
        version = str(next(self._version))
        written = msgspec.structs.replace(metadata, resource_version=version)
        return msgspec.json.encode({"metadata": written})

    @contextlib.contextmanager
    def watched(self, path: str) -> Iterator["queue.Queue[bytes]"]:
        """Yield the events from now on. Kinds that do not change have no events."""
        events, watches = queue.Queue[bytes](), self._sent.get(path, [])
        watches.append(events)
        try:
            yield events
        finally:
            watches.remove(events)

    def obey(self, orders: Connection) -> None:
        """Execute orders forever. Answer each order with the time at which it was received."""
        order, due, others_due, taken_s = Order(), 0.0, 0.0, time.monotonic()
        while True:
            if orders.poll(_TICK_S):
                order = orders.recv()
                while order.drain and self._is_behind():
                    time.sleep(_TICK_S)
                orders.send(time.monotonic())
                if order.burst:
                    for _ in self._fleet.names:
                        self._report()
            now_s = time.monotonic()
            due += order.reports_per_s * (now_s - taken_s)
            others_due += order.others * (now_s - taken_s)
            taken_s = now_s
            while due >= 1:
                self._report()
                due -= 1
            self._tell_others(others_due)
            others_due = 0.0

    def _is_behind(self) -> bool:
        return any(not watch.empty() for watches in self._sent.values() for watch in watches)

    def _report(self) -> None:
        index = next(self._next)
        if not index:
            self._phase = (self._phase + 1) % len(self._reports)
        name = self._fleet.names[index]
        self._stamps[name] = now()
        self._tell(GPUNODES, self._filled(self._reports[self._phase][index], self._stamps[name]))

    def _tell_others(self, seconds: float) -> None:
        for _ in range(self._some(len(self._fleet.names) / _HEARTBEATS_EVERY_S * seconds)):
            self._tell(LEASES, self._lease(self._random.choice(self._fleet.names)))
        for _ in range(self._some(_PODS_PER_S * seconds) if self._pods else 0):
            self._tell(PODS, self._filled(self._random.choice(self._pods), ""))

    def _some(self, expected: float) -> int:
        return int(expected + self._random.random())

    def _tell(self, path: str, item: bytes) -> None:
        for watch in list(self._sent[path]):
            watch.put(b'{"type":"MODIFIED","object":%b}\n' % item)


def _list(items: Iterable[bytes]) -> bytes:
    return b'{"metadata":{"resourceVersion":"1"},"items":[%b]}' % b",".join(items)


def _is_unknown(path: str) -> bool:
    """Return whether the path is an API that is not served, or one object by name."""
    return "resource.k8s.io" in path or path.startswith((f"{GPUNODES}/", "/api/v1/namespaces/"))


def _versioned(metadata: ObjectMeta) -> ObjectMeta:
    return msgspec.structs.replace(metadata, resource_version=_VERSION)


def feed(nodes: int, pods_per_device: int, pipe: Connection) -> None:
    """Run the child process, which sends its port and then receives orders."""
    source = Feed(nodes, pods_per_device)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # As in Go. Otherwise, a head waits until the other side has received the answer before.
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if url.path not in (GPUNODES, NODES, PODS, LEASES):
                return self._send(404 if _is_unknown(url.path) else 200, source.listed(""))
            query = parse_qs(url.query)
            if "watch" in query:
                return self._watch(url.path)
            if selected := query.get("fieldSelector"):
                node = selected[0].split(",")[0].removeprefix("spec.nodeName=")
                return self._send(200, source.pods_on(node))
            return self._send(200, source.listed(url.path))

        def do_PATCH(self) -> None:
            """Accept the reservations of a GPUNode. Its next report does not contain them."""
            self._read()
            name = urlsplit(self.path).path.rpartition("/")[2]
            self._send(200, source.written(name))

        def do_POST(self) -> None:
            self._send(201, self._read())

        def _read(self) -> bytes:
            return self.rfile.read(int(self.headers["Content-Length"]))

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _watch(self, path: str) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            # The loop ends when the client has disconnected.
            with source.watched(path) as events, contextlib.suppress(ConnectionError):
                while True:
                    lines = [events.get()]
                    while not events.empty() and len(lines) < 64:
                        lines.append(events.get())
                    # Like the API server, send what there is at once.
                    self.wfile.write(
                        b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in lines)
                    )

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send(server.server_address[1])
    source.obey(pipe)
