"""Connects a real API server to servers on loopback that act as pods.

The API server rejects pods with loopback addresses. Therefore it connects to pods through a proxy
(``EgressSelectorConfiguration``), as in clusters with Konnectivity. The proxy maps each pod address
to a port on loopback.
"""

import contextlib
import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.controlplane import ControlPlane


class _Connect(socketserver.StreamRequestHandler):
    server: "Egress"

    def handle(self) -> None:
        method, address, _ = self.rfile.readline().decode().split()
        assert method == "CONNECT"
        while self.rfile.readline().strip():
            pass
        # The address of a test's webhook is a loopback port, so connect to it directly.
        host, _, port = address.rpartition(":")
        to_port = self.server.pods.get(address, int(port) if host == "127.0.0.1" else 0)
        try:
            pod = socket.create_connection(("127.0.0.1", to_port))
        except OSError:
            self.wfile.write(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
            return
        with pod:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            back = threading.Thread(target=_pump, args=(pod, self.connection), daemon=True)
            back.start()
            _pump(self.connection, pod)
            back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


class Egress(socketserver.ThreadingUnixStreamServer):
    """A proxy on a Unix socket. ``pods`` maps ``address:port`` of pods to ports on loopback."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), _Connect)
        self.pods: dict[str, int] = {}


class ProxyingPlane(ControlPlane):
    """A control plane whose API server reaches the pods of ``egress.pods``."""

    egress: Egress

    def start(self) -> None:
        self.egress = Egress(self.folder / "egress.sock")
        threading.Thread(target=self.egress.serve_forever, args=(0.05,), daemon=True).start()
        super().start()

    def spawn_apiserver(self, *flags: str) -> None:
        transport = {"uds": {"udsName": str(self.folder / "egress.sock")}}
        connection = {"proxyProtocol": "HTTPConnect", "transport": transport}
        selection = {
            "apiVersion": "apiserver.k8s.io/v1beta1",
            "kind": "EgressSelectorConfiguration",
            "egressSelections": [{"name": "cluster", "connection": connection}],
        }
        path = self.folder / "egress.json"
        path.write_text(json.dumps(selection))
        super().spawn_apiserver(f"--egress-selector-config-file={path}", *flags)

    def stop(self) -> None:
        super().stop()
        self.egress.shutdown()
        self.egress.server_close()

    def publish(self, namespace: str, service: str, port: str, to_port: int) -> None:
        """Create a Service whose only ready pod is the server on this loopback port."""
        address = f"10.99.0.{len(self.egress.pods) + 1}"
        self.egress.pods[f"{address}:{to_port}"] = to_port
        of_namespace = f"namespaces/{namespace}"
        metadata = {"name": service}
        pods = f"/api/v1/{of_namespace}/pods"
        spec = {"containers": [{"name": "server", "image": "none"}], "nodeName": "n"}
        self.call("POST", pods, {"metadata": metadata, "spec": spec})
        status = {"status": {"podIP": address, "podIPs": [{"ip": address}]}}
        self.call("PATCH", f"{pods}/{service}/status", status)
        self.call(
            "POST",
            f"/api/v1/{of_namespace}/services",
            {"metadata": metadata, "spec": {"ports": [{"name": port, "port": 8889}]}},
        )
        target = {"kind": "Pod", "namespace": namespace, "name": service}
        self.call(
            "POST",
            f"/apis/discovery.k8s.io/v1/{of_namespace}/endpointslices",
            {
                "metadata": {**metadata, "labels": {"kubernetes.io/service-name": service}},
                "addressType": "IPv4",
                "ports": [{"name": port, "port": to_port}],
                "endpoints": [
                    {"addresses": [address], "conditions": {"ready": True}, "targetRef": target}
                ],
            },
        )
        # Kubernetes 1.36 and older read Endpoints instead.
        self.call(
            "POST",
            f"/api/v1/{of_namespace}/endpoints",
            {
                "metadata": metadata,
                "subsets": [
                    {
                        "addresses": [{"ip": address, "targetRef": target}],
                        "ports": [{"name": port, "port": to_port}],
                    }
                ],
            },
        )


@contextlib.contextmanager
def proxying_plane() -> Iterator[ProxyingPlane]:
    plane = ProxyingPlane()
    try:
        plane.start()
        plane.install_crd()
        yield plane
    finally:
        plane.stop()
