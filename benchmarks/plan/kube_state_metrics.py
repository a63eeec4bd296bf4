"""The series of a real kube-state-metrics for the pods and nodes of a simulated cluster.

kube-state-metrics reads an API server. Here it reads a stand-in, which lists all pods of the two
weeks together, each with its own times. This works because the series of a pod do not depend on
other pods and do not change while the pod runs. So one scrape has all series of the two weeks, and
the samples of a pod are repeated for its life."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from benchmarks.plan.exported import NAMESPACE, Ran, node_name
from benchmarks.plan.generated import GPUS_OF_NODE
from tests.gobin.build import build, default_cache
from tests.processes import Processes, free_ports
from tests.waiting import until

_SERIES = re.compile(r"^(kube_\w+)\{(.*)\} (\S+)$")
_POD = re.compile(r'(?:^|,)pod="([^"]*)"')
#: The metrics that a plan reads.
_NODES = ("kube_node_status_allocatable", "kube_node_labels")
_PODS = (
    *("kube_pod_container_resource_requests", "kube_pod_created", "kube_pod_start_time"),
    *("kube_pod_completion_time", "kube_pod_owner"),
)


def series(ran: Sequence[Ran], nodes: int, start_s: int) -> tuple[list[str], dict[str, list[str]]]:
    """Return the series of the nodes, and pod name -> series of the pod, as ``name{labels} value``.

    ``start_s`` is the Unix time of second 0 of the history.
    """
    objects = {
        "pods": [_pod(each, start_s) for each in ran],
        "nodes": [_node(number) for number in range(nodes)],
    }
    of_nodes: list[str] = []
    of_pods: dict[str, list[str]] = defaultdict(list)
    for line in _scraped(objects).splitlines():
        found = _SERIES.match(line)
        if found is None:
            continue
        if found[1] in _NODES:
            of_nodes.append(line)
        elif found[1] in _PODS and (pod := _POD.search(found[2])):
            of_pods[pod[1]].append(line)
    return of_nodes, of_pods


def _scraped(objects: Mapping[str, list[dict[str, Any]]]) -> str:
    """Return the exposition of a kube-state-metrics that has read all these objects."""
    program, _ = build("kube-state-metrics", default_cache())
    processes = Processes("headroom-kube-state-metrics-")
    port, own_port = free_ports(2)
    try:
        with _api_server(objects) as address:
            processes.spawn(
                "kube-state-metrics",
                str(program),
                f"--apiserver={address}",
                "--resources=pods,nodes",
                "--metric-labels-allowlist=nodes=[*]",
                *("--host=127.0.0.1", f"--port={port}"),
                *("--telemetry-host=127.0.0.1", f"--telemetry-port={own_port}"),
            )
            text = ""

            def complete() -> bool:
                nonlocal text
                processes.raise_if_ended()
                try:
                    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                        text = answer.read().decode()
                except OSError:
                    return False
                pods, nodes = len(objects["pods"]), len(objects["nodes"])
                return (
                    text.count("\nkube_pod_created{") == pods
                    and text.count("\nkube_node_info{") == nodes
                )

            until(complete, "kube-state-metrics has read all pods", within_s=300)
            return text
    finally:
        processes.stop()


@contextmanager
def _api_server(objects: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Serve lists of these objects, and watches on which nothing happens."""
    ended = Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            kind = url.path.rpartition("/")[2]
            if kind == "version":
                self._answer(200, {"major": "1", "minor": "36", "gitVersion": "v1.36.3"})
            elif kind not in objects:
                self._answer(404, _failure(404, "NotFound"))
            elif "sendInitialEvents=true" in url.query:
                self._answer(400, _failure(400, "Invalid"))
            elif "watch=" in url.query:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.close_connection = True
                ended.wait()
            else:
                name = {"pods": "PodList", "nodes": "NodeList"}[kind]
                listed = {"kind": name, "apiVersion": "v1", "metadata": {"resourceVersion": "1"}}
                self._answer(200, {**listed, "items": objects[kind]})

        def _answer(self, status: int, body: Mapping[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _failure(code: int, reason: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code} | {
        "reason": reason
    }


def _pod(ran: Ran, start_s: int) -> dict[str, Any]:
    row = ran.row
    requests = {"nvidia.com/gpu": str(row.gpus), "cpu": str(4 * row.gpus)}
    requests["memory"] = f"{16 * row.gpus}Gi"
    container = {"name": "main", "image": "work", "resources": {"requests": requests}}
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "controller": True, "uid": row.workload}
    return {
        "metadata": {
            "namespace": NAMESPACE,
            "name": row.name,
            "uid": row.name,
            "resourceVersion": "1",
            "creationTimestamp": _at(start_s + row.created_s),
            "ownerReferences": [{**owner, "name": f"{row.workload}-6d4b75cb6d"}],
        },
        "spec": {"nodeName": node_name(ran.node), "containers": [container]},
        "status": {"phase": "Running", "startTime": _at(start_s + ran.started_s)},
    }


def _node(number: int) -> dict[str, Any]:
    amounts = {"nvidia.com/gpu": str(GPUS_OF_NODE), "cpu": "64", "memory": "512Gi", "pods": "110"}
    labels = {"pool": "a" if number % 2 == 0 else "b"}
    return {
        "metadata": {"name": node_name(number), "uid": node_name(number), "labels": labels},
        "status": {"allocatable": amounts, "capacity": amounts},
    }


def _at(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
