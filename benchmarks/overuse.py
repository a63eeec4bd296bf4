"""Measures how fast leaking pods are evicted, and at which rates of leaking that is too slow.

    python -m benchmarks.overuse [--nodes 105] [--interval-s 5] [--grace-s 5] [--seed 1]

It runs a real etcd, API server and kube-scheduler, and two extenders with ``on_overuse: evict``. On
each node, one pod begins to leak at its reservation, at a constant rate, beside three pods that
stay within theirs. The seed decides sizes, use, priorities and order. Nodes are only Node objects.
The agent's own status writer writes their reports: it samples each node at a different time and
reads the ledger once a second.

Pressure begins when free memory is less than the margin, or less than what the other pods have
reserved and do not use. For each rate, the table shows the seconds from the beginning of the
pressure until the API server shows the pod as terminating, and the number of GPUs whose memory was
used up before the pod had ended. A pod ends ``ENDS_AFTER_S`` after that. Every eviction of a pod
that does not leak counts as wrong."""

import heapq
import logging
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import numpy as np
import structlog
import typer

from agent.overuse import overuse
from agent.status_writer import StatusWriter
from benchmarks.hotpath.machine import machine
from headroom.contract.gpunode import GPUNodeSpec
from tests.controlplane import built, control_plane
from tests.e2e.cluster import PlayedCluster
from tests.e2e.nodes import GIB, Shape
from tests.reverse_proxy import round_robin

MIB = 1 << 20
RATES_MIB_PER_S = (4, 8, 16, 32, 64, 128, 256)
MARGIN_BYTES = 256 * MIB
MEMORY_BYTES = 24 * GIB
HEARTBEAT_S = 30.0
POLL_S = 0.25
LEDGER_S = 1.0
LEAKS_BEFORE_S = 10
ENDS_AFTER_S = 1.0
EXTENDERS = ("extender-a", "extender-b")
PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"
HOSTNAME = "kubernetes.io/hostname"


@dataclass
class Leak:
    node: str
    leaker: str
    rate_bytes_per_s: int
    #: Use of each pod when the leak begins, and free memory that the other pods need.
    used_bytes: dict[str, int]
    needed_bytes: int
    writer: StatusWriter
    began_s: float = 0.0
    #: When the API server showed the pod as terminating, and when the pod ended.
    evicted_s: float | None = None
    ended: bool = False

    def leaked_bytes(self, now_s: float) -> int:
        free_bytes = MEMORY_BYTES - sum(self.used_bytes.values())
        return min(free_bytes, int(self.rate_bytes_per_s * max(0.0, now_s - self.began_s)))

    def _seconds_until_free(self, free_bytes: int) -> float:
        leaked = MEMORY_BYTES - sum(self.used_bytes.values()) - free_bytes
        return max(0, leaked) / self.rate_bytes_per_s

    @property
    def pressure_s(self) -> float:
        return self.began_s + self._seconds_until_free(self.needed_bytes)

    @property
    def full_s(self) -> float:
        return self.began_s + self._seconds_until_free(0)


def main(
    nodes: Annotated[int, typer.Option(min=7)] = 105,
    interval_s: Annotated[float, typer.Option(help="Seconds between two samples of a node.")] = 5.0,
    grace_s: Annotated[float, typer.Option(help="Setting overuse_grace_s.")] = 5.0,
    seed: int = 1,
) -> None:
    built("etcd", "kube-apiserver", "kube-scheduler")
    chance = random.Random(seed)
    # The writer logs each report.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    typer.echo(f"{machine()}; {nodes} nodes, sample every {interval_s:g} s, grace {grace_s:g} s")
    with control_plane() as plane:
        cluster = PlayedCluster(plane, nodes, Shape(gpus=1))
        try:
            cluster.create()
            settings = {"on_overuse": "evict", "overuse_grace_s": grace_s}
            ports = cluster.start_replicas(*EXTENDERS, settings=settings)
            plane.call("POST", PRIORITIES, {"metadata": {"name": "high"}, "value": 1000})
            with round_robin(ports) as url:
                cluster.start_scheduler(url)
                cluster.settle()
                ledgers: dict[str, GPUNodeSpec] = {}
                leaks = [
                    _leak(cluster, name, RATES_MIB_PER_S[i % len(RATES_MIB_PER_S)], chance, ledgers)
                    for i, name in enumerate(cluster.names)
                ]
                cluster.until(lambda: len(cluster.bound()) == 4 * nodes, "all pods are bound", 600)
            wrong = _play(cluster, leaks, interval_s, chance, ledgers)
        finally:
            cluster.close()
    for line in _table(leaks, wrong):
        typer.echo(line)


def _leak(
    cluster: PlayedCluster,
    node: str,
    rate_mib: int,
    chance: random.Random,
    ledgers: Mapping[str, GPUNodeSpec],
) -> Leak:
    """Create the four pods of a node. ``ledgers`` maps each node to its newest ledger."""
    sizes = [chance.randint(2, 7) for _ in range(3)]
    sizes.append(24 - sum(sizes) - chance.randint(0, 1))
    chance.shuffle(sizes)
    names = [f"{node}-{i}" for i in range(4)]
    leaker = chance.choice(names)
    used_bytes: dict[str, int] = {}
    unused_bytes = 0
    for name, size in zip(names, sizes, strict=True):
        spec: dict[str, Any] = {"nodeSelector": {HOSTNAME: node}}
        if chance.random() < 0.5:
            spec["priorityClassName"] = "high"
        cluster.create_pod(name, f"{size}Gi", **spec)
        used_bytes[name] = int(size * GIB * (1 if name == leaker else chance.uniform(0.2, 1)))
        unused_bytes += size * GIB - used_bytes[name]
    writer = StatusWriter(
        cluster.nodes.publisher(node),
        HEARTBEAT_S,
        time.monotonic,
        lambda: datetime.now(UTC),
        random.Random(chance.random()),
        lambda status: overuse(status, ledgers.get(node, GPUNodeSpec())),
    )
    needed_bytes = max(MARGIN_BYTES, unused_bytes)
    # The pressure begins some seconds after the leak, even if the leak is slow.
    spare_bytes = MEMORY_BYTES - sum(used_bytes.values()) - needed_bytes
    used_bytes[leaker] += max(0, spare_bytes - LEAKS_BEFORE_S * rate_mib * MIB)
    return Leak(node, leaker, rate_mib * MIB, used_bytes, needed_bytes, writer)


def _play(
    cluster: PlayedCluster,
    leaks: list[Leak],
    interval_s: float,
    chance: random.Random,
    ledgers: dict[str, GPUNodeSpec],
) -> int:
    """Sample every node until each leaking pod has ended. Return the number of wrong evictions.

    Keeps ``ledgers`` up to date, as the agents' watches do.
    """
    pods = {pod["metadata"]["name"]: pod for pod in cluster.bound()}
    for leak in leaks:
        for name, used_bytes in leak.used_bytes.items():
            cluster.nodes.give(pods[name], 0, used_bytes=used_bytes)
    leakers = {leak.leaker: leak for leak in leaks}
    wrong: set[str] = set()
    start_s = time.monotonic() + interval_s
    for leak in leaks:
        leak.began_s = start_s + chance.uniform(0, interval_s)
    samples = [(start_s - chance.uniform(0, interval_s), i) for i in range(len(leaks))]
    heapq.heapify(samples)
    poll_s = ledger_s = 0.0
    while not all(leak.ended for leak in leaks):
        now_s = time.monotonic()
        if now_s >= ledger_s:
            ledger_s = now_s + LEDGER_S
            ledgers.update({node.name: node.spec for node in cluster.gpunodes()})
        if now_s >= poll_s:
            poll_s = now_s + POLL_S
            for name in _terminating(cluster):
                if name not in leakers:
                    wrong.add(name)
                elif leakers[name].evicted_s is None:
                    leakers[name].evicted_s = now_s
        for leak in leaks:
            if leak.evicted_s is not None and not leak.ended:
                leak.ended = now_s >= leak.evicted_s + ENDS_AFTER_S
                if leak.ended:
                    cluster.delete_pod(leak.leaker)
        if samples[0][0] <= now_s:
            due_s, i = heapq.heappop(samples)
            postponed_s = _sample(cluster, leaks[i])
            heapq.heappush(samples, (min(due_s + interval_s, now_s + postponed_s), i))
        else:
            time.sleep(min(POLL_S, max(0.0, samples[0][0] - now_s)))
    return len(wrong)


def _sample(cluster: PlayedCluster, leak: Leak) -> float:
    """Sample the node. Return the seconds after which the writer needs the next sample at
    latest."""
    now_s = time.monotonic()
    if leak.ended:
        cluster.nodes.end(leak.node, leak.leaker)
    else:
        used_bytes = leak.used_bytes[leak.leaker] + leak.leaked_bytes(now_s)
        cluster.nodes.set_used({leak.leaker: used_bytes})
    return leak.writer.deliver(cluster.nodes.status(leak.node), now_s)


def _terminating(cluster: PlayedCluster) -> Iterator[str]:
    for pod in cluster.pods():
        if "deletionTimestamp" in pod["metadata"]:
            yield pod["metadata"]["name"]


def _table(leaks: list[Leak], wrong: int) -> Iterator[str]:
    yield f"{'MiB/s':>6}{'runs':>6}{'p50 s':>8}{'p99 s':>8}{'used up':>9}"
    rows = [
        (str(rate), [x for x in leaks if x.rate_bytes_per_s == rate * MIB])
        for rate in RATES_MIB_PER_S
    ]
    for label, some in [*rows, ("all", leaks)]:
        took_s = [(x.evicted_s or 0.0) - x.pressure_s for x in some]
        full = sum((x.evicted_s or 0.0) + ENDS_AFTER_S > x.full_s for x in some)
        p50, p99 = np.percentile(took_s, [50, 99])
        yield f"{label:>6}{len(some):>6}{p50:>8.1f}{p99:>8.1f}{full:>9}"
    slack = sorted(x.needed_bytes / GIB for x in leaks)
    yield (
        f"wrong evictions: {wrong}. Free memory when the pressure begins: {slack[0]:.2f} to "
        f"{slack[-1]:.2f} GiB, median {slack[len(slack) // 2]:.2f}"
    )


if __name__ == "__main__":
    typer.run(main)
