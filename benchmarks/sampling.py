"""Measures how long a pod that fits on only one node is pending if kube-scheduler samples nodes.

    python -m benchmarks.sampling [--nodes 5000] [--tries 5] [--changes 20]

kube-scheduler stops looking for feasible nodes at ``percentageOfNodesToScore``, by default a tenth
of 5,000 nodes, and sends only these nodes to the extender. If the only node that fits is not among
them, the pod is unschedulable until some event requeues it. Here all devices of the fleet are
nearly full, except the devices of one node. Each try uses another node. The benchmark measures
the time until the pod is bound, with the default and with 100, in an idle cluster and while running
pods change. It also measures the latency of an ordinary pod in both cases.
"""

import itertools
import statistics
import time
from typing import Annotated

import typer

from benchmarks.hotpath.machine import machine
from benchmarks.real.stage import Bound, Stage, latencies, pending, stage
from benchmarks.real.start import start_scheduler
from benchmarks.scale_objects import fill, gpunode, node_name
from benchmarks.storm import LARGE, SMALL, changes
from tests.e2e.cluster import NAMESPACE

#: The benchmark gives up a pod that is pending for this long. Other pods arrive meanwhile.
PATIENCE_S = 60.0


def empty(on: Stage, index: int) -> None:
    """Delete all pods and reservations of the node."""
    name = node_name(index)
    gone = [f"pod-{number}" for number in range(index, on.nodes * on.held, on.nodes)]
    for pod in gone:
        on.delete(f"pods/{NAMESPACE}/{pod}")
    fill(on.plane, [(f"headroom.gpu/gpunodes/{name}", gpunode(index, ()))])


def attempts(on: Stage) -> int:
    return int(on.headroom.metric('headroom_verb_duration_seconds_count{verb="filter"}'))


def play(on: Stage, percentage: int, per_s: int, tries: int, turns: "itertools.count[int]") -> None:
    took_s, asked = list[float](), list[int]()
    indices = [next(turns) * on.nodes // 37 % on.nodes for _ in range(tries)]
    with Bound(on.plane) as bound:
        url = on.start_headroom()
        start_scheduler(on.plane, url, {"percentageOfNodesToScore": percentage})
        first = f"run-{percentage}-{per_s}-first"
        on.put([pending(first, SMALL)])
        bound.wait([first])  # kube-scheduler has listed everything by now
        names = [f"run-{percentage}-{per_s}-{number}" for number in range(20)]
        ordinary_s = latencies(on, bound, names, [SMALL] * len(names), 0.2)
        with changes(on, per_s):
            for index in indices:
                empty(on, index)
                name = f"run-{percentage}-{per_s}-large-{index}"
                time.sleep(0.5)
                before = attempts(on)
                on.put([pending(name, LARGE)])
                began_s = time.monotonic()
                try:
                    bound.wait([name], PATIENCE_S)
                    took_s.append(bound.at_s[name] - began_s)
                except TimeoutError:
                    took_s.append(float("inf"))
                asked.append(attempts(on) - before)
                on.clear("run-")
        on.kill("kube-scheduler", "extender")
    on.refill(indices)
    typer.echo(
        f"{percentage or 'default':>7}  {per_s:>9}  {1e3 * statistics.median(ordinary_s):>11.0f}  "
        f"{statistics.median(took_s):>8.2f}  {max(took_s):>6.2f}  {asked}"
    )


def main(
    nodes: Annotated[int, typer.Option(help="Number of nodes, with 8 GPUs each.")] = 5_000,
    tries: Annotated[int, typer.Option(min=1)] = 5,
    per_s: Annotated[int, typer.Option("--changes", help="Updates of bound pods per second.")] = 20,
) -> None:
    """Print how long the pod is pending, in seconds, and how many filter calls it takes."""
    typer.echo(machine(), err=True)
    typer.echo(
        f"{'percent':>7}  {'changes/s':>9}  {'ordinary ms':>11}  {'median s':>8}  {'most s':>6}  "
        f"filter calls (inf: not within {PATIENCE_S:.0f} s)"
    )
    turns = itertools.count(1)
    with stage(nodes, held=8) as on:
        for per in (0, per_s):
            for percentage in (100, 0):
                play(on, percentage, per, tries, turns)


if __name__ == "__main__":
    typer.run(main)
