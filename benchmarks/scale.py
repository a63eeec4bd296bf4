"""Measures a restart in a large cluster: the time from kill to ready, and the memory afterwards.

    python -m benchmarks.scale [--nodes 5000] [--pods 100000] [--gpu-pods 20000] [--restarts 3]
        [--churned 4000] [--churn-s 3600]

A real etcd and a real API server hold the cluster: nodes of 8 time-sliced GPUs, each with its
report, its heartbeat and the reservations of its GPU pods, and all other pods. To save time, the
benchmark writes the objects to etcd in the API server's JSON format while the API server is down.

Extender, console and webhook are the real processes, each with its own rights. The benchmark kills
one after the other with SIGKILL and starts it again while the others run. A process is ready when
/readyz returns success. The results also show the CPU time of process and API server until then,
and the number of watches. Then pods come and go: as fast as one client can create and delete them,
or evenly over --churn-s seconds. The goals for the extender are: ready within 15 s, less than 250
MiB resident, and no growth with the churn (samples differ by up to 5 MiB).
"""

import contextlib
import json
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import urllib3
import yaml

from benchmarks.hotpath.bodies import pod_as_sent
from benchmarks.hotpath.machine import machine
from benchmarks.scale_objects import (
    GROWN_MIB,
    READY_S,
    RESIDENT_MIB,
    cluster_objects,
    fill,
    heartbeats,
    node_name,
    pod,
)
from benchmarks.vitals import vitals
from tests.certificates import Authority
from tests.controlplane import ADMIN_TOKEN, ROOT, ControlPlane, control_plane
from tests.e2e.cluster import PODS, SHIPPED, Cluster
from tests.processes import free_ports
from tests.waiting import until

_PATIENCE_S = 300.0
#: After this time the API server serves the watches of a process that is ready, and has closed the
#: watches of a process that is gone.
_SETTLE_S = 2.0


class Part:
    """One of the three processes, as it is deployed, with its own settings file."""

    def __init__(
        self,
        plane: ControlPlane,
        name: str,
        url: str,
        settings: Mapping[str, Any],
        ca: Path | None = None,
    ) -> None:
        self.plane, self.name = plane, name
        self.url, self._settings = url, settings
        self._http = urllib3.PoolManager(retries=False, timeout=5.0, ca_certs=ca and str(ca))

    def start(self, settings: Mapping[str, Any] | None = None) -> float:
        """Start the process; return when it is ready, with the seconds that this took."""
        config = self.plane.folder / f"{self.name}.headroom.yaml"
        config.write_text(yaml.safe_dump({**self._settings, **(settings or {})}))
        kubeconfig = self.plane.kubeconfig(f"{self.name}-of-the-tests")
        began_s = time.monotonic()
        self.plane.spawn(
            self.name,
            *(sys.executable, "-m", "headroom", self.name, "--config", str(config)),
            env={"KUBECONFIG": str(kubeconfig), "PYTHONPATH": str(ROOT)},
        )
        until(self._is_ready, f"{self.name} is ready", _PATIENCE_S)
        return time.monotonic() - began_s

    def _is_ready(self) -> bool:
        self.plane.raise_if_ended()
        with contextlib.suppress(urllib3.exceptions.HTTPError):
            return self._http.request("GET", f"{self.url}/readyz").status == 200
        return False

    @property
    def pid(self) -> int:
        return self.plane.pid(self.name)


class Extender(Part):
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        (self.journal_port,) = free_ports(1)
        ports = {"verbs_port": cluster.port, "debug_port": self.journal_port}
        url = f"http://127.0.0.1:{self.journal_port}"
        super().__init__(
            cluster.plane,
            "extender",
            url,
            {**SHIPPED, **ports, "debug_open": True, "insecure_verbs": True},
        )

    def metric(self, sample: str) -> float:
        """Return one sample of /metrics by its name and labels as printed, or 0 if it is absent."""
        text = self._http.request("GET", f"{self.url}/metrics").data.decode()
        values = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(sample)]
        return float(values[0]) if values else 0.0

    def fitting(self, nodes: int) -> int:
        """Return on how many nodes a small pod fits, as proof that the extender uses what it
        listed."""
        sent = pod_as_sent("asked", "1Gi")
        names = [node_name(index) for index in range(nodes)]
        body = msgspec.json.encode({"Pod": sent, "Nodes": None, "NodeNames": names})
        url = f"http://127.0.0.1:{self._cluster.port}/filter"
        answer = self._http.request("POST", url, body=body).json()
        return len(answer["NodeNames"] or ())

    def listed(self) -> list[tuple[str, float, int]]:
        """Return kind, seconds and number of objects of each list of the last start.

        The seconds are counted from the first complete list until this list was complete.
        """
        lines = [
            json.loads(line)
            for line in self._cluster.plane.log("extender").splitlines()
            if '"source_listed"' in line
        ]
        lists = {line["kind"]: line for line in lines}.values()
        at = {line["kind"]: datetime.fromisoformat(line["timestamp"]) for line in lists}
        first = min(at.values())
        return [
            (line["kind"], (at[line["kind"]] - first).total_seconds(), line["objects"])
            for line in lists
        ]


def parts(cluster: Cluster) -> tuple[Extender, Part, Part]:
    """Return extender, console and webhook."""
    plane, extender = cluster.plane, Extender(cluster)
    debug, reviews = free_ports(2)
    journal = f"127.0.0.1:{extender.journal_port}"
    shown = {"extenders": [journal], "debug_port": debug, "debug_open": True}
    authority = Authority(plane.folder, "webhook-ca")
    signed = authority.sign("webhook")
    served = {
        "webhook_port": reviews,
        "debug_port": 0,
        "webhook_tls_cert": str(signed.cert),
        "webhook_tls_key": str(signed.key),
    }
    return (
        extender,
        Part(plane, "console", f"http://127.0.0.1:{debug}", shown),
        Part(plane, "webhook", f"https://127.0.0.1:{reviews}", served, authority.cert),
    )


def watches(plane: ControlPlane) -> int:
    """Return how many watches the API server serves, including its own."""
    http = urllib3.PoolManager(ca_certs=str(plane.ca_file), retries=False, timeout=60.0)
    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    text = http.request("GET", f"{plane.url}/metrics", headers=headers).data.decode()
    found = re.findall(r'^apiserver_longrunning_requests\{.*verb="WATCH".*\} (\S+)$', text, re.M)
    return int(sum(map(float, found)))


@dataclass(frozen=True, slots=True)
class Churned:
    """``writes`` is the number of writes to etcd meanwhile. ``samples`` are pairs of the number of
    writes so far, and MiB."""

    pods: int
    writes: int
    took_s: float
    cpu_s: float
    api_cpu_s: float
    samples: Sequence[tuple[int, float]]

    @property
    def grown_mib(self) -> float:
        """Return the growth in MiB, by linear regression over the second half of the samples.

        The first half fills the records of recent decisions and deleted pods.
        """
        later = self.samples[len(self.samples) // 2 :]
        slope, _ = statistics.linear_regression(*zip(*later, strict=True))
        return slope * self.writes


def churn(plane: ControlPlane, pid: int, nodes: int, count: int, over_s: float) -> Churned:
    """Create bound pods and delete them, in ``over_s`` seconds or as fast as one client can.

    The extender adopts each pod as an unreserved pod and later removes it. Memory is sampled a
    hundred times.
    """
    began, api_began = vitals(pid), vitals(plane.pid("kube-apiserver"))
    samples: list[tuple[int, float]] = []
    first = revision(plane)
    for number in range(count):
        time.sleep(max(0.0, began.at_s + over_s * number / count - time.monotonic()))
        name = f"churn-{number}"
        manifest = pod(number, number % nodes, gpu=True)
        manifest["metadata"] = {"name": name, "annotations": manifest["metadata"]["annotations"]}
        plane.call("POST", PODS, manifest)
        # The kubelet would write this; without it, the end of a deleted pod needs an agent's
        # sample.
        path = f"{PODS}/{name}/status"
        plane.call("PATCH", path, {"status": {"phase": "Succeeded"}})
        plane.call("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})
        if number % max(1, count // 100) == 0:
            samples.append((revision(plane) - first, vitals(pid).resident_mib))
    ended = vitals(pid)
    return Churned(
        pods=count,
        writes=revision(plane) - first,
        took_s=ended.at_s - began.at_s,
        cpu_s=ended.cpu_s - began.cpu_s,
        api_cpu_s=vitals(plane.pid("kube-apiserver")).cpu_s - api_began.cpu_s,
        samples=samples,
    )


def revision(plane: ControlPlane) -> int:
    """Return the revision of etcd, which grows by one with every write."""
    listed = plane.call("GET", f"{PODS}?limit=1")
    return int(listed["metadata"]["resourceVersion"])


def main(
    nodes: Annotated[int, typer.Option(help="Nodes of 8 GPUs.")] = 5_000,
    pods: Annotated[int, typer.Option(help="Total number of pods.")] = 100_000,
    gpu_pods: Annotated[int, typer.Option(help="Number of these pods that have a GPU.")] = 20_000,
    restarts: Annotated[int, typer.Option(min=1, help="How often each process is killed.")] = 3,
    churned: Annotated[int, typer.Option(help="Number of pods that come and go.")] = 4_000,
    churn_s: Annotated[
        float, typer.Option(help="Minimum duration of the churn, in seconds.")
    ] = 0.0,
) -> None:
    """Print seconds from kill to ready, and MiB resident."""
    typer.echo(machine())
    with control_plane() as plane:
        cluster = Cluster(plane, ())
        cluster.create()
        plane.kill("kube-apiserver")
        began_s = time.monotonic()
        size = fill(plane, cluster_objects(nodes, pods, gpu_pods))
        typer.echo(f"wrote {size / 2**20:.0f} MiB to etcd in {time.monotonic() - began_s:.0f} s")
        plane.start_apiserver(_PATIENCE_S)
        extender, *others = parts(cluster)
        took_s: list[float] = []
        served: dict[str, int] = {}
        typer.echo(
            f"{'':<8}  {'start':>5}  {'ready s':>7}  {'CPU s':>6}  {'API CPU s':>9}  {'MiB':>6}  "
            f"{'peak MiB':>8}  {'watches':>7}"
        )
        for part in (extender, *others):
            for turn in range(restarts + 1):
                fill(plane, heartbeats(nodes))
                before = watches(plane)
                api_cpu_s = -vitals(plane.pid("kube-apiserver")).cpu_s
                # With the shipped setting, filter would return only the best node.
                ready_s = part.start({"filter_best_only": False})
                ready = vitals(part.pid)
                api_cpu_s += vitals(plane.pid("kube-apiserver")).cpu_s
                time.sleep(_SETTLE_S)
                served[part.name] = watches(plane) - before
                typer.echo(
                    f"{part.name:<8}  {turn or 'first':>5}  {ready_s:>7.2f}  {ready.cpu_s:>6.1f}  "
                    f"{api_cpu_s:>9.1f}  {ready.resident_mib:>6.0f}  {ready.peak_mib:>8.0f}  "
                    f"{served[part.name]:>7}"
                )
                if turn and part is extender:
                    took_s.append(ready_s)
                if turn < restarts:
                    plane.kill(part.name)
                    time.sleep(_SETTLE_S)
        typer.echo(f"{extender.fitting(nodes)} nodes take a small pod; objects listed, and when:")
        for kind, at_s, count in extender.listed():
            typer.echo(f"  {at_s:>6.2f} s  {count:>7} {kind}")
        seen = churn(plane, extender.pid, nodes, churned, churn_s)
        after = vitals(extender.pid)
        typer.echo(
            f"{seen.pods} pods came and went in {seen.took_s:.0f} s with {seen.writes} writes, "
            f"each for {1e3 * seen.cpu_s / seen.pods:.1f} ms of CPU here and "
            f"{1e3 * seen.api_cpu_s / seen.pods:.1f} ms at the API server; "
            f"{seen.grown_mib:+.1f} MiB at the rate of the second half:"
        )
        for writes, mib in seen.samples[:: max(1, len(seen.samples) // 10)]:
            typer.echo(f"  {writes:>8} writes  {mib:>6.1f} MiB")
        held = {name: vitals(plane.pid(name)).resident_mib for name in served}
        for name, mib in held.items():
            typer.echo(f"{name:<8}  {mib:>6.0f} MiB  {served[name]:>3} watches")
        total = sum(held.values()), sum(served.values())
        typer.echo(f"together  {total[0]:>6.0f} MiB  {total[1]:>3} watches")
        ready_s = statistics.median(took_s)
        for what, figure, goal in (
            ("kill to ready, s", ready_s, READY_S),
            ("resident, MiB", after.resident_mib, RESIDENT_MIB),
            ("peak resident, MiB", after.peak_mib, RESIDENT_MIB),
            ("grown in churn, MiB", seen.grown_mib, GROWN_MIB),
        ):
            met = "met" if figure < goal else "NOT MET"
            typer.echo(f"{what:<20}{figure:>8.1f}  goal {goal:.0f}: {met}")


if __name__ == "__main__":
    typer.run(main)
