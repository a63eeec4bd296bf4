"""Runs pods that leak GPU memory beside innocent pods, on real kubelets and with two extenders.

    make overuse ARGS="--runs 100 --nodes 6 --seed 1 [--for-s 450] [--to runs.jsonl]"

Each run has its own node: a pod that leaks and three pods that stay within their reservations, on
one GPU of 24 GiB. Kubelet, device plugin, agent, API server, kube-scheduler and extenders are real;
the container runtime and the driver's library are not. The seed and the number of a run determine
sizes, use, order of creation, priorities, disruption budgets, the rate of the leak and the events
of the run. One of the two extenders is killed once a minute and started again.

A run is judged by the memory that the pods used, and by the pods at the API server:

* wrong evictions: of innocent pods, of pods that a budget protects, and of pods that used no more
  than their reservation when the newest sample was taken;
* an innocent pod is out of memory if it cannot allocate what it reserved;
* duration: from the beginning of the pressure to the eviction. Pressure begins when free memory is
  less than the margin, or less than what the innocent pods have reserved and do not use.

With ``--to``, runs are appended to a file. Runs that the file already contains are not repeated,
and the tables cover all runs in it, so 100 runs can be made in parts (``--for-s``). With
``--observe``, no pod may be evicted. Then the number of pods that would have been evicted is
printed, and the number that each extender counted."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.hotpath.machine import machine
from benchmarks.overuse import PRIORITIES
from benchmarks.overuse_runs import AGENT, GRACE_S, INTERVAL_S, Outcome, Run
from tests.controlplane import built, control_plane
from tests.e2e.cluster import GPUNODES, PODS
from tests.e2e.real import RealCluster
from tests.e2e.test_evictions import REPLICAS, granted
from tests.e2e.watching import Watch
from tests.reverse_proxy import round_robin

STEP_S = 0.2
LEDGER_S = 0.5
#: Seconds between two kills of an extender, and from a kill to the next start.
KILLED_EVERY_S, DOWN_S = 60.0, 3.0
WOULD_EVICT = 'headroom_overuse_evictions_total{outcome="would_evict"}'


class Play:
    """All runs, as many at the same time as there are nodes."""

    def __init__(
        self,
        cluster: RealCluster,
        numbers: list[int],
        seed: int,
        file: Path | None,
        observe: bool,
        for_s: float,
    ) -> None:
        self._cluster, self._numbers, self._seed, self._file = cluster, numbers, seed, file
        self._ends_s = time.monotonic() + for_s
        self._observe = observe
        self._active: dict[str, Run] = {}
        self._leaving: dict[str, Run] = {}
        self._killed_s = time.monotonic()
        self._down = ""
        self.outcomes: list[Outcome] = []

    def play(self, settings: dict[str, Any], ports: list[int]) -> None:
        deleted_s: dict[str, float] = {}
        ledgers: dict[str, dict[str, Any]] = {}
        seen, ledger_s = 0, 0.0
        with Watch(self._cluster.plane, PODS) as watch:
            while self._numbers or self._active or self._leaving:
                now_s = time.monotonic()
                if now_s >= self._ends_s:
                    self._numbers.clear()
                changes = watch.changes[seen:]
                seen += len(changes)
                for at_s, pod in changes:
                    if "deletionTimestamp" in pod["metadata"]:
                        deleted_s.setdefault(pod["metadata"]["name"], at_s)
                if now_s >= ledger_s:
                    ledger_s = now_s + LEDGER_S
                    ledgers = self._ledgers()
                self._kill_extenders(now_s, settings, ports)
                self._step(deleted_s, ledgers)
                time.sleep(max(0.0, now_s + STEP_S - time.monotonic()))
        if self._down:
            self._start(self._down, settings, ports)

    def _ledgers(self) -> dict[str, dict[str, Any]]:
        """Return node -> name of the pod -> its reservation."""
        return {
            node["metadata"]["name"]: {
                held["name"]: held for held in node["spec"].get("reservations", {}).values()
            }
            for node in self._cluster.plane.call("GET", GPUNODES)["items"]
        }

    def _step(self, deleted_s: dict[str, float], ledgers: dict[str, dict[str, Any]]) -> None:
        for node, run in list(self._leaving.items()):
            names = {pod["metadata"]["name"] for pod in self._cluster.pods()}
            if run.gone(names, ledgers[node]):
                del self._leaving[node]
        for node in self._cluster.names:
            if node in self._active or node in self._leaving or not self._numbers:
                continue
            run = self._active[node] = Run(
                self._cluster, node, self._seed, self._numbers.pop(0), self._observe
            )
            run.create()
        for node, run in list(self._active.items()):
            if run.step(deleted_s, ledgers[node]):
                run.remove()
                self._leaving[node] = self._active.pop(node)
                self._write(run.outcome)

    def _write(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        typer.echo(f"{outcome}", err=True)
        if self._file:
            with self._file.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")

    def _kill_extenders(self, now_s: float, settings: dict[str, Any], ports: list[int]) -> None:
        if self._down and now_s >= self._killed_s + DOWN_S:
            self._start(self._down, settings, ports)
            self._down = ""
        elif now_s >= self._killed_s + KILLED_EVERY_S and not self._observe:
            self._killed_s = now_s
            self._down = REPLICAS[int(now_s // KILLED_EVERY_S) % 2]
            self._cluster.kill(self._down)

    def _start(self, name: str, settings: dict[str, Any], ports: list[int]) -> None:
        self._cluster.start_extender(name, ports[REPLICAS.index(name)], settings=settings)


def main(
    runs: int = 100,
    nodes: Annotated[int, typer.Option(help="Number of runs at the same time.")] = 6,
    seed: int = 1,
    first: Annotated[int, typer.Option(help="Number of the first run.")] = 0,
    for_s: Annotated[float, typer.Option(help="No run begins after these seconds.")] = math.inf,
    to: Annotated[Path | None, typer.Option(help="File to which runs are appended.")] = None,
    observe: Annotated[bool, typer.Option(help="Mode observe: no pod may be evicted.")] = False,
) -> None:
    built("etcd", "kube-apiserver", "kube-scheduler", "kubelet", "nvidia-device-plugin")
    settings = {"on_overuse": "evict", "overuse_grace_s": GRACE_S}
    if observe:
        settings["mode"] = "observe"
    typer.echo(f"{machine()}; sample every {INTERVAL_S:g} s, grace {GRACE_S:g} s, seed {seed}")
    with ExitStack() as stack:
        plane = stack.enter_context(control_plane())
        cluster = RealCluster(plane, nodes, gpus=1, replicas=4, agent_flags=AGENT)
        stack.callback(cluster.close)
        cluster.create()
        ports = cluster.start_replicas(*REPLICAS, settings=settings)
        plane.call("POST", PRIORITIES, {"metadata": {"name": "high"}, "value": 1000})
        cluster.start_scheduler(stack.enter_context(round_robin(ports)))
        cluster.settle()
        before = granted(plane)
        played = {(each.seed, each.number) for each in _read(to)}
        numbers = [each for each in range(first, first + runs) if (seed, each) not in played]
        play = Play(cluster, numbers, seed, to, observe, for_s)
        play.play(settings, ports)
        answers = granted(plane)
        answers.subtract(before)
        if observe:
            would = [cluster.metric(WOULD_EVICT, each) for each in REPLICAS]
            due = sum(each.would for each in play.outcomes)
            typer.echo(f"would be evicted: {due} pods; counted by the extenders: {would}")
    outcomes = play.outcomes
    evicted = sum(each.took_s is not None for each in outcomes)
    typer.echo(f"evictions that the API server accepted: {answers['201']} of {evicted} pods")
    for line in table(_read(to) or outcomes):
        typer.echo(line)


def _read(file: Path | None) -> list[Outcome]:
    """Return the runs in the file, or none if there is no file yet."""
    if file is None or not file.exists():
        return []
    return [Outcome(**json.loads(line)) for line in file.read_text().splitlines()]


def table(outcomes: list[Outcome]) -> Iterator[str]:
    """Format the durations by event, and the pods out of memory by the rate of the leak."""
    titles = (f"{each:>8}" for each in ("runs", "evicted", "p50 s", "p99 s", "max s"))
    yield f"{'event':<16}{'budget':<12}{''.join(titles)}"
    kinds = sorted({(each.event, each.budget) for each in outcomes})
    for event, budget in [*kinds, ("all", "")]:
        some = [x for x in outcomes if event == "all" or (x.event, x.budget) == (event, budget)]
        took_s = [x.took_s for x in some if x.took_s is not None]
        spread = np.percentile(took_s, [50, 99, 100]) if took_s else ()
        figures = "".join(f"{each:>8.1f}" for each in spread)
        yield f"{event:<16}{budget:<12}{len(some):>8}{len(took_s):>8}{figures}"
    yield f"{'MiB/s':<16}{'runs':>6}{'innocent pods out of memory':>30}"
    edges = (0, 16, 32, 64, 128, 256, 513)
    due = [each for each in outcomes if each.due]
    for low, high in pairwise(edges):
        some = [each for each in due if low <= each.rate_mib < high]
        count = sum(len(each.out_of_memory) for each in some)
        yield f"{f'{low} to {high}':<16}{len(some):>6}{count:>30}"
    wrong = [(each.number, each.wrong) for each in outcomes if each.wrong]
    yield f"wrong evictions: {len(wrong)} {wrong or ''}"


if __name__ == "__main__":
    typer.run(main)
