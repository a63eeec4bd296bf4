"""Measures failures of engines that profile memory while they start, and how to prevent them.

    python -m benchmarks.starts [--pairs 50] [--pods 200] [--nodes 40] [--seed 1] [--scale 0.1]
        [--max-backoff-s 30]

It runs a real etcd, API server and kube-scheduler, and two extenders, of which kube-scheduler calls
one. The benchmark plays kubelets, agents and engines, on nodes with one GPU of 24 GiB. The engine
is a stand-in for vLLM: it checks that its share of the GPU is free, loads its weights, measures the
memory that other processes use, profiles, measures again, and fails if the two differ. Otherwise it
allocates the rest of its share and becomes ready. If it fails, it frees everything and starts again
after a back-off that doubles. Durations are drawn from the seed.

* **Pairs**: two engines per GPU, created together, without and with annotation
  ``headroom.gpu/startup: alone``. All durations are multiplied by ``--scale``.
* **Burst**: many engines at once, all with the annotation, on any node, in real time. The
  *hand-over* is the time from the moment at which an engine is ready until the next engine is bound
  to its GPU. It is how much longer a pod waits than its predecessor takes to start.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.hotpath.machine import machine
from tests.controlplane import built, control_plane, scheduler_configuration
from tests.e2e.cluster import PODS, PlayedCluster, pod_manifest
from tests.e2e.nodes import GIB, Shape

EXTENDERS = ("extender-a", "extender-b")
GPU = Shape(gpus=1)
HOSTNAME = "kubernetes.io/hostname"
ALONE = {"headroom.gpu/startup": "alone"}
#: Seconds between two looks at the API server, and between two steps of the engines.
POLL_S, STEP_S = 0.1, 0.02
#: Ranges of seconds at scale 1: from the bind to the start of the engine, for loading, and for
#: profiling.
KUBELET_S, LOAD_S, PROFILE_S = (1.0, 5.0), (10.0, 40.0), (5.0, 20.0)
#: Seconds from the first failure to the next start, as with a kubelet, and the maximum of this
#: back-off as a multiple of it.
FIRST_BACK_OFF_S, MOST_BACK_OFFS = 10.0, 30
PATIENCE_S = 900.0


@dataclass
class Engine:
    """One pod, and the engine that runs in it."""

    name: str
    share_bytes: int
    load_s: float
    profile_s: float
    kubelet_s: float
    back_off_s: float
    node: str = ""
    bound_s: float = 0.0
    #: When its current process begins, and its state: it waits, loads, profiles or is ready.
    begins_s: float = 0.0
    state: str = "waits"
    used_bytes: int = 0
    #: Memory that other engines used when it began to profile.
    others_bytes: int = 0
    ready_s: float = 0.0
    failures: int = 0

    @property
    def weights_bytes(self) -> int:
        return self.share_bytes // 2

    def step(self, now_s: float, others_bytes: int) -> bool:
        """Advance to this time; return whether the engine has become ready."""
        age_s = now_s - self.begins_s
        match self.state:
            case "waits" if age_s >= 0:
                if GPU.memory_bytes - others_bytes < self.share_bytes:
                    self._fail(now_s)
                else:
                    self.state = "loads"
            case "loads":
                self.used_bytes = int(self.weights_bytes * min(1.0, age_s / self.load_s))
                if age_s >= self.load_s:
                    self.state, self.others_bytes = "profiles", others_bytes
            case "profiles" if others_bytes != self.others_bytes:
                self._fail(now_s)
            case "profiles" if age_s >= self.load_s + self.profile_s:
                self.used_bytes, self.state, self.ready_s = self.share_bytes, "ready", now_s
                return True
        return False

    def _fail(self, now_s: float) -> None:
        self.used_bytes, self.state = 0, "waits"
        self.begins_s = now_s + self.back_off_s * min(2**self.failures, MOST_BACK_OFFS)
        self.failures += 1


@dataclass
class Played:
    engines: list[Engine]
    #: Seconds from the creation of the first pod until all engines were ready.
    took_s: float
    #: The highest number of engines that started on one GPU at the same time.
    most_at_once: int
    #: For each hand-over: seconds from the moment at which an engine was ready until the next one
    #: was bound to its GPU, and for how long the first engine had started.
    hand_overs_s: list[float] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)


def main(
    pairs: Annotated[int, typer.Option(min=1)] = 50,
    pods: Annotated[int, typer.Option(min=1, help="Number of pods in the burst.")] = 200,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes for the burst.")] = 40,
    seed: int = 1,
    scale: Annotated[float, typer.Option(help="Factor on the durations of pairs.")] = 0.1,
    max_backoff_s: Annotated[
        int, typer.Option(help="podMaxBackoffSeconds of kube-scheduler.")
    ] = 30,
) -> None:
    built("etcd", "kube-apiserver", "kube-scheduler")
    typer.echo(f"{machine()}; seed {seed}")
    typer.echo(f"{'':<24}{'failed':>8}{'failures':>10}{'at once':>9}{'all ready s':>13}")
    for alone in (False, True):
        engines = drawn(2 * pairs, 10 * GIB, seed, scale)
        played = play(engines, pairs, max_backoff_s, alone, pinned=True)
        label = f"{pairs} pairs, {'alone' if alone else 'not alone'}"
        typer.echo(_row(label, played))
    engines = drawn(pods, 4 * GIB, seed, 1.0)
    played = play(engines, nodes, max_backoff_s, alone=True, pinned=False)
    typer.echo(_row(f"{pods} pods, {nodes} GPUs", played))
    for line in _burst(played, nodes):
        typer.echo(line)


def drawn(count: int, share_bytes: int, seed: int, scale: float) -> list[Engine]:
    chance = random.Random(seed)
    return [
        Engine(
            f"engine-{i:03}",
            share_bytes,
            load_s=scale * chance.uniform(*LOAD_S),
            profile_s=scale * chance.uniform(*PROFILE_S),
            kubelet_s=scale * chance.uniform(*KUBELET_S),
            back_off_s=scale * FIRST_BACK_OFF_S,
        )
        for i in range(count)
    ]


def play(
    engines: list[Engine], nodes: int, max_backoff_s: int, alone: bool, pinned: bool
) -> Played:
    """Create the pods, and play until all engines are ready. With ``pinned`` each node gets two."""
    with control_plane() as plane:
        cluster = PlayedCluster(plane, nodes, GPU)
        try:
            cluster.create()
            ports = cluster.start_replicas(*EXTENDERS)
            kubeconfig = plane.kubeconfig("scheduler-of-the-tests")
            shipped = scheduler_configuration(f"http://127.0.0.1:{ports[0]}", kubeconfig)
            configuration = shipped | {"podMaxBackoffSeconds": max_backoff_s}
            cluster.start_scheduler_as("kube-scheduler", configuration)
            cluster.settle()
            began_s = time.monotonic()
            for i, engine in enumerate(engines):
                node = cluster.names[i // 2] if pinned else ""
                plane.call("POST", PODS, _manifest(engine, node, alone))
            return _play(cluster, engines, began_s)
        finally:
            cluster.close()


def _manifest(engine: Engine, node: str, alone: bool) -> dict[str, Any]:
    manifest = pod_manifest(f"{engine.share_bytes // GIB}Gi")
    manifest["metadata"]["name"] = engine.name
    manifest["metadata"]["annotations"] |= ALONE if alone else {}
    container = manifest["spec"]["containers"][0]
    container["readinessProbe"] = {"httpGet": {"path": "/health", "port": 8000}}
    if node:
        manifest["spec"]["nodeSelector"] = {HOSTNAME: node}
    return manifest


def _play(cluster: PlayedCluster, engines: Sequence[Engine], began_s: float) -> Played:
    by_name = {engine.name: engine for engine in engines}
    on: dict[str, list[Engine]] = {name: [] for name in cluster.names}
    played = Played(list(engines), 0.0, 0)
    poll_s = beat_s = 0.0
    while any(engine.state != "ready" for engine in engines):
        now_s = time.monotonic()
        if now_s - began_s > PATIENCE_S:
            raise TimeoutError(f"not all engines are ready after {PATIENCE_S:.0f} s")
        if now_s >= poll_s:
            poll_s = now_s + POLL_S
            _admit(cluster, by_name, on, played, now_s)
        if now_s >= beat_s:
            beat_s = now_s + 20
            cluster.nodes.beat(cluster.names)
        for there in on.values():
            starting = [e for e in there if e.state in ("loads", "profiles")]
            played.most_at_once = max(played.most_at_once, len(starting))
            for engine in there:
                others_bytes = sum(e.used_bytes for e in there if e is not engine)
                if engine.step(now_s, others_bytes):
                    _become_ready(cluster, engine)
        time.sleep(STEP_S)
    played.took_s = time.monotonic() - began_s
    return played


def _admit(
    cluster: PlayedCluster,
    by_name: dict[str, Engine],
    on: dict[str, list[Engine]],
    played: Played,
    now_s: float,
) -> None:
    """Let the kubelets start the engines of pods that were bound since the last look."""
    changed: set[str] = set()
    for pod in cluster.bound():
        engine = by_name[pod["metadata"]["name"]]
        if engine.node:
            continue
        engine.node, engine.bound_s = pod["spec"]["nodeName"], now_s
        engine.begins_s = now_s + engine.kubelet_s
        if on[engine.node] and all(e.ready_s for e in on[engine.node]):
            before = max(on[engine.node], key=lambda e: e.ready_s)
            played.hand_overs_s.append(now_s - before.ready_s)
            played.starts_s.append(before.ready_s - before.bound_s)
        on[engine.node].append(engine)
        cluster.nodes.give(pod, 0)
        changed.add(engine.node)
    cluster.nodes.report(sorted(changed))


def _become_ready(cluster: PlayedCluster, engine: Engine) -> None:
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    # No process can know it earlier, so the hand-over is measured from here.
    engine.ready_s = time.monotonic()
    path = f"{PODS}/{engine.name}/status"
    cluster.plane.call("PATCH", path, {"status": status})
    cluster.nodes.set_used({engine.name: engine.used_bytes})
    cluster.nodes.report([engine.node])


def _row(label: str, played: Played) -> str:
    failed = sum(engine.failures > 0 for engine in played.engines)
    failures = sum(engine.failures for engine in played.engines)
    return f"{label:<24}{failed:>8}{failures:>10}{played.most_at_once:>9}{played.took_s:>13.1f}"


def _burst(played: Played, nodes: int) -> Iterator[str]:
    starts_s = [engine.ready_s - engine.bound_s for engine in played.engines]
    first = len(played.engines) - len(played.hand_overs_s)
    yield (
        f"{len(played.engines) / played.took_s:.1f} starts per second; a start takes "
        f"{np.mean(starts_s):.1f} s on average, so {nodes} GPUs allow "
        f"{nodes / np.mean(starts_s):.1f}"
    )
    longer = sum(np.greater(played.hand_overs_s, played.starts_s))
    p50, p99 = np.percentile(played.hand_overs_s, [50, 99])
    yield (
        f"{len(played.hand_overs_s)} hand-overs ({first} pods had no predecessor): p50 "
        f"{p50:.2f} s, p99 {p99:.2f} s, at most {max(played.hand_overs_s):.2f} s; longer than the "
        f"start of the predecessor: {longer}"
    )


if __name__ == "__main__":
    typer.run(main)
