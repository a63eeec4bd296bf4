"""Measures whether a storm of reports delays binds, with and without deploy/base/flowcontrol.yaml.

    python -m benchmarks.fairness [--agents 64] [--binds 200]

The API server is real but has few seats, so a small storm fills them. One client for each agent
reports without a pause, with the rights of the agents. Meanwhile, one client makes the two writes
of a bind, one bind after the other: the reservation, then the Binding. The result compares their
duration with and without the storm, in the same run."""

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
import urllib3
import yaml

from benchmarks.hotpath.machine import machine
from tests.controlplane import ROOT, ControlPlane, control_plane
from tests.e2e.cluster import GPUNODES, PODS, Cluster, pod_manifest

FLOWCONTROL = "/apis/flowcontrol.apiserver.k8s.io/v1"
#: Limits of concurrent requests. The API server's default is 600.
SEATS = ("--max-requests-inflight=12", "--max-mutating-requests-inflight=8")
#: Seconds within which an API server reloads its FlowSchemas.
SETTLE_S = 12.0
MERGE = "application/merge-patch+json"


class Client:
    def __init__(self, plane: ControlPlane, token: str) -> None:
        self._url = plane.url
        self._headers = {"Authorization": f"Bearer {token}"}
        self._http = urllib3.PoolManager(
            ca_certs=str(plane.ca_file), retries=False, timeout=60.0, maxsize=1
        )

    def send(self, method: str, path: str, body: Any, kind: str = "application/json") -> int:
        headers = {**self._headers, "Content-Type": kind}
        return self._http.request(method, self._url + path, json=body, headers=headers).status


@contextlib.contextmanager
def storm(plane: ControlPlane, agents: int) -> Iterator[list[int]]:
    """Send reports without a pause. Yield the numbers of accepted and rejected reports."""
    stop, counts = threading.Event(), [0, 0]

    def report(number: int) -> None:
        client = Client(plane, "agent-of-the-tests")
        while not stop.is_set():
            body = {"status": {"agentVersion": f"{number}-{time.monotonic_ns()}"}}
            status = client.send("PATCH", f"{GPUNODES}/busy-{number % 8}/status", body, MERGE)
            counts[status >= 300] += 1

    threads = [threading.Thread(target=report, args=(number,)) for number in range(agents)]
    for thread in threads:
        thread.start()
    time.sleep(2.0)
    try:
        yield counts
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def binds(plane: ControlPlane, first: int, count: int) -> list[float]:
    """Return the seconds that each bind took."""
    client = Client(plane, "extender-of-the-tests")
    took_s = []
    for number in range(first, first + count):
        name = f"p{number}"
        manifest = pod_manifest("1Gi")
        manifest["metadata"]["name"] = name
        plane.call("POST", PODS, manifest)
        reservation = {
            "spec": {"reservations": {f"uid-{number}": {"namespace": "e2e", "name": name}}}
        }
        target = {"apiVersion": "v1", "kind": "Node", "name": "busy"}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
        began_s = time.monotonic()
        for method, path, body, kind in (
            ("PATCH", f"{GPUNODES}/bound", reservation, MERGE),
            ("POST", f"{PODS}/{name}/binding", {**binding, "target": target}, "application/json"),
        ):
            while client.send(method, path, body, kind) == 429:
                time.sleep(0.05)
        took_s.append(time.monotonic() - began_s)
    return took_s


def main(
    agents: Annotated[
        int, typer.Option(help="Number of clients that report without a pause.")
    ] = 64,
    count: Annotated[int, typer.Option("--binds", help="Binds in each round.")] = 200,
) -> None:
    """Print how much longer a bind takes during the storm than without it."""
    typer.echo(machine())
    with control_plane() as plane:
        cluster = Cluster(plane, ())
        cluster.create()
        for name in ("bound", *(f"busy-{number}" for number in range(8))):
            kind = {"apiVersion": "headroom.gpu/v1alpha1", "kind": "GPUNode"}
            plane.call("POST", GPUNODES, {**kind, "metadata": {"name": name}})
        plane.kill("kube-apiserver")
        plane.start_apiserver(300.0, *SEATS)
        for turn, what in enumerate(("without a FlowSchema", "with Headroom's")):
            if turn:
                text = (ROOT / "deploy/base/flowcontrol.yaml").read_text()
                for manifest in yaml.safe_load_all(text):
                    plane.call("POST", f"{FLOWCONTROL}/{manifest['kind'].lower()}s", manifest)
                time.sleep(SETTLE_S)
            calm_s = binds(plane, (2 * turn) * count, count)
            with storm(plane, agents) as reports:
                began_s = time.monotonic()
                stormy_s = binds(plane, (2 * turn + 1) * count, count)
                rate = reports[0] / (time.monotonic() - began_s)
            calm, stormy = statistics.median(calm_s), statistics.median(stormy_s)
            p99 = sorted(stormy_s)[int(len(stormy_s) * 0.99)]
            typer.echo(
                f"{what:<22} a bind beside {rate:.0f} reports/s takes {stormy / calm:.1f} times as "
                f"long as without (p99 {p99 / calm:.1f}); {reports[1]} reports rejected"
            )


if __name__ == "__main__":
    typer.run(main)
