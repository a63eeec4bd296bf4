"""Measures how often two schedulers overfill a node, and what the check of Headroom's bind costs.

    python -m benchmarks.two_schedulers [--races 8] [--rounds 6] [--json]

It runs a real etcd and API server, Headroom's own kube-scheduler, and the cluster's kube-scheduler
without Headroom. There are no kubelets. Two variants take turns: ``checked`` is the extender as
shipped, and ``unchecked`` is the same without the list of the node's pods before each Binding.

For the race, there are ten nodes of 128 CPUs, and ten pods of 100 CPUs for each scheduler, created
at once. A node with two of them is overfilled: its kubelet would reject one (OutOfcpu).

For the cost, the same nodes have ``--held`` small pods each, and GPU pods come one after the other.
The duration of bind, and the CPU of the processes for each bind, are compared within a round.
"""

import contextlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from benchmarks.real.stage import Bound
from benchmarks.vitals import vitals
from tests.controlplane import control_plane
from tests.e2e.cluster import PODS, PlayedCluster, pod_manifest
from tests.e2e.conftest import SparingPlane
from tests.e2e.nodes import Shape
from tests.waiting import until

NODES = 10
CPUS = "100"
DEFAULT = "default-scheduler"
MODULES = {"unchecked": "benchmarks.real.unchecked", "checked": "extender"}
#: If no pod has changed for this many seconds, all pods that could be bound are bound.
QUIET_S = 4.0
PROCESSES = "extender", "kube-apiserver"


@dataclass(frozen=True, slots=True)
class Race:
    variant: str
    round: int
    bound: int
    #: Number of nodes with two pods on which Headroom's pod was bound last, and of nodes on which
    #: it was bound first.
    ours_last: int
    ours_first: int
    #: For each such node, the milliseconds between its two binds.
    apart_ms: list[float]
    declined: int


@dataclass(frozen=True, slots=True)
class Cost:
    variant: str
    round: int
    #: Mean duration of a bind call, in milliseconds.
    bind_ms: float
    #: CPU milliseconds of each process for each bind.
    cpu_ms: dict[str, float]


def pod(name: str, ours: bool, cpu: str) -> dict[str, Any]:
    manifest = pod_manifest("1Gi" if ours else None, gpus=int(ours))
    manifest["metadata"]["name"] = name
    limits = {"cpu": cpu, "memory": "64Mi"}
    manifest["spec"]["containers"][0]["resources"]["limits"] |= limits
    if not ours:
        manifest["spec"]["schedulerName"] = DEFAULT
    return manifest


class Schedulers:
    """Both schedulers, and an extender of one of the variants."""

    def __init__(self, cluster: PlayedCluster) -> None:
        self.cluster = cluster
        kubeconfig = str(cluster.plane.kubeconfig("scheduler-of-the-tests"))
        stock = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": kubeconfig},
            "leaderElection": {"leaderElect": False},
        }
        cluster.start_scheduler_as("scheduler-of-the-cluster", stock)

    @contextlib.contextmanager
    def variant(self, name: str) -> Iterator[None]:
        cluster = self.cluster
        url = cluster.start_extender(module=MODULES[name])
        cluster.start_scheduler(url)
        cluster.settle()
        cluster.until(cluster.is_ready, "the extender is ready")
        self._bind("warm", ours=True)
        self._bind("warm-other", ours=False)
        self.clear()
        yield
        self.clear()
        cluster.kill("kube-scheduler")
        cluster.kill("extender")

    def _bind(self, name: str, ours: bool) -> None:
        self.cluster.plane.call("POST", PODS, pod(name, ours, "1"))
        self.cluster.until(lambda: bool(self.cluster.node_of(name)), f"{name} is bound")

    def clear(self, keep: str = "held-") -> None:
        """Delete the pods except those with this prefix, and wait until the ledger is empty."""
        cluster = self.cluster
        for each in cluster.pods():
            if not each["metadata"]["name"].startswith(keep):
                cluster.delete_by_force(each["metadata"]["name"])

        def empty() -> bool:
            cluster.nodes.report(cluster.names)
            return not any(node.spec.reservations for node in cluster.gpunodes())

        cluster.until(empty, "the ledger is empty")

    def race(self, variant: str, number: int) -> Race:
        cluster = self.cluster
        before = cluster.metric('headroom_binds_total{outcome="declined"}')
        with Bound(cluster.plane) as watch:
            for index in range(NODES):
                for ours in (True, False):
                    name = f"{'gpu' if ours else 'plain'}-{index}"
                    cluster.plane.call("POST", PODS, pod(name, ours, CPUS))
            self._quiet(watch)
            pods = cluster.bound()
        on: dict[str, list[str]] = defaultdict(list)
        for each in pods:
            on[each["spec"]["nodeName"]].append(each["metadata"]["name"])
        pairs = [sorted(names, key=lambda n: watch.at_s[n]) for names in on.values()]
        pairs = [names for names in pairs if len(names) > 1]
        return Race(
            variant,
            number,
            len(pods),
            sum(names[-1].startswith("gpu") for names in pairs),
            sum(names[-1].startswith("plain") for names in pairs),
            [1e3 * (watch.at_s[names[-1]] - watch.at_s[names[0]]) for names in pairs],
            round(cluster.metric('headroom_binds_total{outcome="declined"}') - before),
        )

    def _quiet(self, watch: Bound) -> None:
        """Wait until all places are taken and no pod was bound for a while."""
        seen, since_s = 0, time.monotonic()

        def quiet() -> bool:
            nonlocal seen, since_s
            if len(watch.at_s) != seen:
                seen, since_s = len(watch.at_s), time.monotonic()
            return seen >= NODES and time.monotonic() - since_s > QUIET_S

        until(quiet, "no pod is bound any more", every_s=0.1)

    def cost(self, variant: str, number: int, binds: int) -> Cost:
        cluster = self.cluster

        def spent() -> dict[str, float]:
            return {name: vitals(cluster.plane.pid(name)).cpu_s for name in PROCESSES}

        def bind_s() -> float:
            return cluster.metric('headroom_verb_duration_seconds_sum{verb="bind"}')

        names = [f"cost-{index}" for index in range(binds)]
        before, began_s = spent(), bind_s()
        with Bound(cluster.plane) as watch:
            for name in names:
                cluster.plane.call("POST", PODS, pod(name, True, "1m"))
                watch.wait([name])
        after = spent()
        cpu_ms = {name: 1e3 * (after[name] - before[name]) / binds for name in PROCESSES}
        return Cost(variant, number, 1e3 * (bind_s() - began_s) / binds, cpu_ms)


def hold(cluster: PlayedCluster, held: int) -> None:
    """Run small pods of the cluster's scheduler on each node."""
    for node in cluster.names:
        for index in range(held):
            manifest = pod(f"held-{node}-{index}", False, "1m")
            manifest["spec"]["nodeName"] = node
            cluster.plane.call("POST", PODS, manifest)
            path = f"{PODS}/{manifest['metadata']['name']}/status"
            status = {"phase": "Running", "startTime": "2026-11-28T12:00:00Z"}
            cluster.plane.call("PATCH", path, {"status": status})


def show(races: Sequence[Race], costs: Sequence[Cost]) -> Iterator[str]:
    for variant in MODULES:
        mine = [each for each in races if each.variant == variant]
        if mine:
            last = [each.ours_last for each in mine]
            first = [each.ours_first for each in mine]
            apart = sorted(ms for each in mine for ms in each.apart_ms)
            yield (
                f"race  {variant:<10} overfilled nodes of {NODES} in each round: "
                f"{', '.join(str(a + b) for a, b in zip(last, first, strict=True))}; "
                f"Headroom's pod last {sum(last)}, first {sum(first)}; "
                f"{sum(each.declined for each in mine)} binds declined; "
                f"apart {', '.join(f'{ms:.0f}' for ms in apart)} ms"
            )
    of = {(each.round, each.variant): each for each in costs}
    for variant in MODULES:
        mine_cost = [each for each in costs if each.variant == variant]
        if mine_cost:
            ratios = [each.bind_ms / of[each.round, "unchecked"].bind_ms for each in mine_cost]
            cpu = {n: statistics.median(e.cpu_ms[n] for e in mine_cost) for n in PROCESSES}
            yield (
                f"cost  {variant:<10} bind {statistics.median(e.bind_ms for e in mine_cost):.2f} "
                f"ms, of unchecked {statistics.median(ratios):.2f} "
                f"({', '.join(f'{ratio:.2f}' for ratio in ratios)}); CPU ms for each bind: "
                f"{', '.join(f'{name} {ms:.1f}' for name, ms in cpu.items())}"
            )


def main(
    races: Annotated[int, typer.Option(help="Number of races of each variant.")] = 8,
    rounds: Annotated[int, typer.Option(help="Number of rounds in which cost is measured.")] = 6,
    binds: Annotated[int, typer.Option(help="Number of binds of each variant in a round.")] = 40,
    held: Annotated[int, typer.Option(help="Pods on each node while cost is measured.")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    raced: list[Race] = []
    costs: list[Cost] = []
    with control_plane(SparingPlane) as plane:
        cluster = PlayedCluster(plane, NODES, Shape(gpus=8))
        cluster.create()
        schedulers = Schedulers(cluster)
        for number in range(races):
            for variant in sorted(MODULES, reverse=bool(number % 2)):
                with schedulers.variant(variant):
                    raced.append(schedulers.race(variant, number))
                typer.echo(raced[-1], err=True)
        hold(cluster, held)
        for number in range(rounds):
            for variant in sorted(MODULES, reverse=bool(number % 2)):
                with schedulers.variant(variant):
                    costs.append(schedulers.cost(variant, number, binds))
                typer.echo(costs[-1], err=True)
        cluster.close()
    for line in show(raced, costs):
        typer.echo(line)
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in (*raced, *costs)], indent=1))


if __name__ == "__main__":
    typer.run(main)
