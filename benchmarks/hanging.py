"""Measures how long pods without a GPU are pending while the extender hangs and GPU pods wait.

    python -m benchmarks.hanging [--deployment own] [--waiting 50] [--hang 20] [--down 5]

The extender is stopped (SIGSTOP), so it accepts connections but never answers. ``--waiting`` GPU
pods are created, and then pods without a GPU, one after the other, until the extender works again.
After ``--hang`` seconds, the extender is killed, as by the kubelet after a failed liveness probe.
From then on connections are rejected, as by kube-proxy for a Service without ready extenders.
``--down`` seconds later, it is started again.

    own        deploy/base: pods without a GPU that name Headroom's scheduler, and others that name
               the cluster's own scheduler, which runs beside it
    default    deploy/default-scheduler: all pods name the cluster's scheduler, which calls Headroom
"""

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
import yaml

from benchmarks.hotpath.machine import machine
from benchmarks.real.stage import Bound, quantile
from tests.controlplane import ROOT, SCHEDULER_NAME, ControlPlane, control_plane
from tests.e2e.cluster import PlayedCluster
from tests.e2e.nodes import Shape

CLUSTERS_OWN = "default-scheduler"
#: Seconds between two pods without a GPU.
EVERY_S = 0.25
NODES = 10
#: Settings for nodes that send no heartbeats.
LASTING = {"stale_after_s": 3600.0}


def configuration(plane: ControlPlane, folder: str, url: str) -> dict[str, Any]:
    """Return the shipped configuration of kube-scheduler for the extender at ``url``."""
    file = ROOT / "deploy" / folder / "kube-scheduler.yaml"
    content: dict[str, Any] = yaml.load(file.read_text(), yaml.CSafeLoader)
    for extender in content["extenders"]:
        extender["urlPrefix"] = url
        for key in ("enableHTTPS", "tlsConfig"):  # the time limit of a call includes TLS
            extender.pop(key, None)
    return content | _runs_alone(plane)


def _runs_alone(plane: ControlPlane) -> dict[str, Any]:
    kubeconfig = str(plane.kubeconfig("scheduler-of-the-tests"))
    client = {"kubeconfig": kubeconfig, "qps": 5000, "burst": 10000}
    return {"clientConnection": client, "leaderElection": {"leaderElect": False}}


def stock(plane: ControlPlane) -> dict[str, Any]:
    """Return the configuration of a kube-scheduler that does not call Headroom."""
    kind = "KubeSchedulerConfiguration"
    return {"apiVersion": "kubescheduler.config.k8s.io/v1", "kind": kind} | _runs_alone(plane)


class Plain:
    """Creates pods without a GPU for one scheduler, one after the other, until ``stop``."""

    def __init__(self, cluster: PlayedCluster, prefix: str, scheduler: str) -> None:
        self._cluster, self._prefix, self._scheduler = cluster, prefix, scheduler
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._create)
        #: Pod -> monotonic time of its creation.
        self.created_s: dict[str, float] = {}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _create(self) -> None:
        while not self._over.wait(EVERY_S):
            name = f"{self._prefix}-{len(self.created_s):04d}"
            self.created_s[name] = time.monotonic()
            self._cluster.create_pod(name, None, gpus=0, schedulerName=self._scheduler)

    def waits_s(self, bound: Bound) -> list[float]:
        """Return the seconds for which each pod was pending, after all have been bound."""
        at_s = bound.wait(self.created_s, patience_s=600)
        return [
            at - self.created_s[name] for name, at in zip(sorted(self.created_s), at_s, strict=True)
        ]


def measure(
    plane: ControlPlane, deployment: str, waiting: int, hang_s: float, down_s: float
) -> Mapping[str, tuple[list[float], list[float]]]:
    """Return kind of pods -> the seconds that pods were pending, without and with the hang."""
    own = deployment == "own"
    with contextlib.closing(PlayedCluster(plane, NODES, Shape(replicas=16))) as cluster:
        cluster.create()
        url = cluster.start_extender(settings=LASTING)
        scheduler = SCHEDULER_NAME if own else CLUSTERS_OWN
        folder = "base" if own else "default-scheduler"
        cluster.start_scheduler_as("calls-headroom", configuration(plane, folder, url))
        kinds = {scheduler: "of the scheduler that calls Headroom"}
        if own:
            cluster.start_scheduler_as("clusters-own", stock(plane))
            kinds[CLUSTERS_OWN] = "of the cluster's scheduler"
        cluster.settle()
        found: dict[str, tuple[list[float], list[float]]] = {}
        with Bound(plane) as bound:
            quiet = _while(cluster, "quiet", kinds, lambda: time.sleep(10.0))
            quiet_s = {each: made.waits_s(bound) for each, made in quiet.items()}
            cluster.plane.pause("extender")
            for number in range(waiting):
                cluster.create_pod(f"gpu-{number:03d}", "1Gi", schedulerName=scheduler)

            def hang() -> None:
                time.sleep(hang_s)
                cluster.kill("extender")
                time.sleep(down_s)
                cluster.start_extender(port=cluster.port, settings=LASTING)
                cluster.until(cluster.is_ready, "the extender is ready")
                bound.wait([f"gpu-{number:03d}" for number in range(waiting)], patience_s=600)

            hung = _while(cluster, "hung", kinds, hang)
            for each, made in hung.items():
                found[kinds[each]] = quiet_s[each], made.waits_s(bound)
    return found


def _while(
    cluster: PlayedCluster, phase: str, schedulers: Mapping[str, str], what: Callable[[], None]
) -> dict[str, Plain]:
    """Create pods without a GPU for each scheduler while ``what`` runs."""
    made = {each: Plain(cluster, f"{phase}-{each}", each) for each in schedulers}
    for each in made.values():
        each.start()
    try:
        what()
    finally:
        for each in made.values():
            each.stop()
    return made


def main(
    deployment: Annotated[str, typer.Option(help="own or default.")] = "own",
    waiting: Annotated[int, typer.Option(help="Number of GPU pods that wait.")] = 50,
    hang_s: Annotated[
        float, typer.Option("--hang", help="Seconds for which the extender hangs.")
    ] = 20.0,
    down_s: Annotated[
        float, typer.Option("--down", help="Seconds until it is started again.")
    ] = 5.0,
) -> None:
    """Print the pending times of pods without a GPU, in seconds: median, 99th percentile, most."""
    typer.echo(machine(), err=True)
    with control_plane() as plane:
        found = measure(plane, deployment, waiting, hang_s, down_s)
    shown = f"{datetime.now(UTC):%Y-%m-%d} {deployment}, {waiting} GPU pods, hang {hang_s:g} s"
    typer.echo(f"{shown}, then down {down_s:g} s")
    for kind, phases in found.items():
        for phase, waits_s in zip(("quiet", "hang"), phases, strict=True):
            p50_s, p99_s = statistics.median(waits_s), quantile(waits_s, 0.99)
            typer.echo(
                f"  pods {kind}, {phase}: {p50_s:.2f} {p99_s:.2f} {max(waits_s):.2f} s "
                f"({len(waits_s)} pods)"
            )


if __name__ == "__main__":
    typer.run(main)
