"""Measures pods per second of the real kube-scheduler, without an extender and with Headroom.

    python -m benchmarks.cluster [--nodes 1000] [--nodes 5000] [--rounds 3] [--pods 300] [--json]

It runs a real etcd, API server and kube-scheduler (the newest that the tests have). Nodes are plain
Node objects of 8 GPUs, each with its GPUNode and with running pods. In every round, each variant
schedules a number of pods that are created together, and then some that are created one at a time:

    none      kube-scheduler without an extender
    nothing   an extender that accepts all nodes and binds (benchmarks/real/nothing.py)
    swap      the same, with a compare-and-swap on the node's GPUNode before the Binding
    headroom  the extender as shipped
    all       the same without ``filter_best_only``; only if ``--variants`` names it

All variants use the same ``percentageOfNodesToScore``. They are restarted for each round, in a
different order. Rates are compared within a round. The CPU seconds per pod of all processes show
where the time is spent. The goal is that headroom binds at least 0.9 times as many pods per second
as nothing.

Another goal is that filter and prioritize together cost less than 10 % of kube-scheduler's CPU.
Their CPU comes from ``headroom_verb_cpu_seconds_total`` while pods arrive together. This metric
counts the extender's thread while it parses a call, and while it answers it. It does not see other
costs, above all receiving the bytes and starting the task of the call. They are measured afterwards
and added: while kube-scheduler is down, calls of the same size are made, and the metric is
subtracted from the CPU of the process."""

import contextlib
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import msgspec
import typer

from benchmarks.hotpath.calling import Caller
from benchmarks.hotpath.machine import machine
from benchmarks.real.stage import UNHURRIED, Bound, Stage, latencies, pending, quantile, stage
from benchmarks.real.start import start_nothing, start_scheduler
from benchmarks.scale_objects import node_name
from tests.processes import free_ports

VARIANTS = ("none", "nothing", "swap", "headroom")
GOAL = 0.9
VRAM = "8Gi"
#: Number of calls that measure what the metric does not count.
ASKED = 300


@dataclass(frozen=True, slots=True)
class Run:
    nodes: int
    percentage: int
    round: int
    variant: str
    pods_per_s: float
    #: Seconds from the creation of a pod until it was bound, if pods are created one at a time.
    p50_s: float
    p99_s: float
    #: CPU milliseconds that each process takes for one of the pods that were created together.
    cpu_ms: dict[str, float]
    #: CPU milliseconds of filter and prioritize alone, including HTTP.
    verbs_ms: float | None


@contextlib.contextmanager
def extender(on: Stage, variant: str) -> Iterator[str | None]:
    """Run the variant's extender, if there is one, and yield its address."""
    match variant:
        case "none":
            yield None
        case "headroom" | "all":
            yield on.start_headroom(best_only=variant == "headroom")
            on.kill("extender")
        case _:
            (port,) = free_ports(1)
            yield start_nothing(on.plane, port, *(["--swap"] if variant == "swap" else []))
            on.kill("nothing")


@dataclass(frozen=True, slots=True)
class Calls:
    """Number of filter and prioritize calls, and their CPU seconds by the metric."""

    count: float
    cpu_s: float

    @classmethod
    def so_far(cls, on: Stage) -> "Calls":
        def total(metric: str) -> float:
            samples = (f'{metric}{{verb="{verb}"}}' for verb in ("filter", "prioritize"))
            return sum(map(on.headroom.metric, samples))

        return cls(
            total("headroom_verb_duration_seconds_count"), total("headroom_verb_cpu_seconds_total")
        )

    def since(self, earlier: "Calls") -> "Calls":
        return Calls(self.count - earlier.count, self.cpu_s - earlier.cpu_s)


def unseen_s(on: Stage) -> float:
    """Return the CPU seconds of a call that the metric does not count."""
    caller, dice = Caller(on.cluster.port), random.Random(1)
    names = [node_name(index) for index in range(on.nodes)]
    bodies = [
        msgspec.json.encode(
            {
                "Pod": pending(f"asked-{n}", VRAM),
                "Nodes": None,
                "NodeNames": dice.sample(names, len(names)),
            }
        )
        for n in range(ASKED)
    ]
    began, before = Calls.so_far(on), on.spent("extender")
    for body in bodies:
        caller.post("filter", body)
    spent, calls = on.spent("extender").since(before), Calls.so_far(on).since(began)
    caller.close()
    return (spent.of["extender"] - calls.cpu_s) / calls.count


def run(on: Stage, turn: int, variant: str, pods: int, percentage: int, profile: str) -> Run:
    names = [f"run-{turn}-{variant}-{number:04d}" for number in range(pods)]
    config = {"clientConnection": UNHURRIED, "percentageOfNodesToScore": percentage}
    with Bound(on.plane) as bound, extender(on, variant) as url:
        start_scheduler(on.plane, url, config)
        first = f"run-{turn}-{variant}-first"
        on.put([pending(first, VRAM)])
        bound.wait([first])
        processes = ["etcd", "kube-apiserver", "kube-scheduler"]
        own = {"none": [], "headroom": ["extender"], "all": ["extender"]}
        processes += own.get(variant, ["nothing"])
        ours = "extender" in processes
        began = Calls.so_far(on) if ours else Calls(0, 0)
        before = on.spent(*processes)
        with on.profiled(profile, variant):
            on.put(pending(name, VRAM) for name in names)
            at_s = bound.wait(names)
        spent = on.spent(*processes).since(before)
        calls = Calls.so_far(on).since(began) if ours else began
        calm = [f"run-{turn}-{variant}-calm-{number}" for number in range(max(20, pods // 4))]
        took_s = latencies(on, bound, calm, [VRAM] * len(calm), 0.1)
        on.kill("kube-scheduler")
        verbs_s = calls.cpu_s + calls.count * unseen_s(on) if ours else None
    on.clear("run-")
    return Run(
        nodes=on.nodes,
        percentage=percentage,
        round=turn,
        variant=variant,
        pods_per_s=(len(names) - 1) / (max(at_s) - min(at_s)),
        p50_s=statistics.median(took_s),
        p99_s=quantile(took_s, 0.99),
        cpu_ms={name: 1e3 * cpu_s / pods for name, cpu_s in spent.of.items()},
        verbs_ms=None if verbs_s is None else 1e3 * verbs_s / pods,
    )


def show(each: Run) -> None:
    spent = "  ".join(f"{name} {ms:.1f}" for name, ms in each.cpu_ms.items())
    if each.verbs_ms is not None:  # the goal is less than 10 %
        ratio = each.verbs_ms / each.cpu_ms["kube-scheduler"]
        spent += f"  filter and prioritize {each.verbs_ms:.1f} ({ratio:.1%} of kube-scheduler)"
    typer.echo(
        f"{each.nodes:>6}  {each.percentage or 'default':>7}  {each.round:>5}  {each.variant:<9}"
        f"{each.pods_per_s:>8.1f}  {1e3 * each.p50_s:>7.1f}  {1e3 * each.p99_s:>7.1f}  {spent}",
        err=True,
    )


def summary(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the medians of the ratios within each round."""
    yield f"{'nodes':>6}  {'percent':>7}  {'variant':<9}{'pods/s':>8}  of nothing (each round)"
    for nodes, percentage in sorted({(each.nodes, each.percentage) for each in runs}):
        here = [each for each in runs if (each.nodes, each.percentage) == (nodes, percentage)]
        rate = {(each.round, each.variant): each.pods_per_s for each in here}
        for variant in dict.fromkeys(each.variant for each in here):
            mine = {turn: r for (turn, what), r in rate.items() if what == variant}
            line = f"{nodes:>6}  {percentage or 'default':>7}  {variant:<9}"
            line += f"{statistics.median(mine.values()):>8.1f}"
            ratios = [
                r / rate[turn, "nothing"] for turn, r in mine.items() if (turn, "nothing") in rate
            ]
            if ratios:
                each_round = ", ".join(f"{ratio:.2f}" for ratio in ratios)
                line += f"  {statistics.median(ratios):.2f} ({each_round})"
            if variant == "headroom" and ratios:
                line += ": goal met" if statistics.median(ratios) >= GOAL else ": goal NOT MET"
            yield line


def main(
    nodes: Annotated[
        list[int] | None, typer.Option(help="Number of nodes. Can be repeated.")
    ] = None,
    percentage: Annotated[
        list[int] | None, typer.Option(help="percentageOfNodesToScore; 0: default.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    pods: Annotated[
        int, typer.Option(min=20, help="Number of pods that are created at once.")
    ] = 300,
    held: Annotated[int, typer.Option(help="Running pods on each node.")] = 4,
    variants: Annotated[str, typer.Option(help="Comma-separated list of variants.")] = ",".join(
        VARIANTS
    ),
    profile: Annotated[
        str, typer.Option(help="Path of py-spy: write profiles of the extenders to profiles/.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print every run as JSON.")] = False,
) -> None:
    """Print the pods per second that each variant binds, and the ratios within each round."""
    typer.echo(machine(), err=True)
    runs: list[Run] = []
    chosen = variants.split(",")
    for size in nodes or [1_000, 5_000]:
        with stage(size, held) as on:
            for share in percentage or [100]:
                for turn in range(rounds):
                    for shift in range(len(chosen)):
                        variant = chosen[(turn + shift) % len(chosen)]
                        runs.append(run(on, turn, variant, pods, share, profile))
                        show(runs[-1])
    if as_json:
        json.dump([asdict(each) for each in runs], sys.stdout, indent=1)
    else:
        typer.echo("\n".join(summary(runs)))


if __name__ == "__main__":
    typer.run(main)
