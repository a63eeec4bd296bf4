"""Compares preemption by Headroom with kube-scheduler's own, on a real control plane.

    python -m benchmarks.preemption [--seconds-to-end 20] [--ways ...]

The ways: ``stock`` is kube-scheduler without an extender. ``headroom`` is Headroom as shipped, with
``evict_for_memory``. ``gates`` is the same with kube-scheduler's default feature gates, which let
it take pods out of the back-off queue when it is idle. ``asked`` is Headroom as shipped, except
that only kube-scheduler evicts pods.

A newcomer would die if the device on which it is allocated cannot hold it. The benchmark computes
that device as the device plugin does, which chooses the device with the fewest allocated replicas
and ignores memory.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated

import typer

from tests.controlplane import ControlPlane, built, control_plane
from tests.controlplane import scheduler_configuration as shipped
from tests.e2e.cluster import PlayedCluster
from tests.e2e.nodes import GIB, Shape
from tests.e2e.preempting import SCENARIOS, Outcome, Scenario, Stage
from tests.kubernetes_version import scheduler_flags

PAIR = Shape(gpus=2, replicas=4)
WAYS = ("stock", "asked", "headroom", "gates")


@contextlib.contextmanager
def stage_of(plane: ControlPlane, way: str) -> Iterator[Stage]:
    cluster = PlayedCluster(plane, 2, PAIR)
    try:
        cluster.create()
        stage = Stage(cluster, has_extender=way != "stock")
        stage.create_classes()
        url = ""
        if stage.has_extender:
            url = cluster.start_extender(settings={"evict_for_memory": way != "asked"})
        start_scheduler(cluster, url, gates=way in ("stock", "gates"))
        if stage.has_extender:
            cluster.settle()
        yield stage
    finally:
        cluster.close()


def start_scheduler(cluster: PlayedCluster, url: str, gates: bool) -> None:
    plane = cluster.plane
    content = shipped(url, plane.kubeconfig("scheduler-of-the-tests"))
    if not url:
        del content["extenders"]
    config = plane.folder / "of-the-benchmark.json"
    config.write_text(json.dumps(content))
    flags = () if gates else scheduler_flags("kube-scheduler")
    binary = built("kube-scheduler")["kube-scheduler"]
    plane.spawn("kube-scheduler", str(binary), f"--config={config}", "--secure-port=0", *flags)
    cluster._started.append("kube-scheduler")


def would_die(scenario: Scenario, outcome: Outcome) -> int:
    """Return how many newcomers are on a device that cannot hold all pods that are on it."""
    on: dict[tuple[str, int], list[int]] = {
        (node, index): [] for node in scenario.nodes for index in range(PAIR.gpus)
    }
    for batch in scenario.running:
        if batch.name not in outcome.evicted:
            on[batch.node, batch.index].append(batch.gib)
    dead = 0
    for number, gib in enumerate(scenario.newcomers):
        node = outcome.bound.get(f"new-{number}")
        if node is None:
            continue
        place = min((key for key in on if key[0] == node), key=lambda key: len(on[key]))
        on[place].append(gib)
        dead += sum(on[place]) * GIB > PAIR.memory_bytes
    return dead


def row(way: str, scenario: Scenario, outcome: Outcome) -> Sequence[str]:
    right = set(outcome.evicted) in scenario.victims
    waits = len(scenario.newcomers) - len(outcome.took_s)
    dead = would_die(scenario, outcome)
    useless = len(outcome.evicted) if dead or not outcome.took_s else outcome.in_vain
    took = " ".join(f"{took_s:.1f}" for took_s in outcome.took_s.values()) or "-"
    calls = "-" if way == "stock" else str(outcome.filter_calls)
    evicted = f"{len(outcome.evicted)}{'' if right else ' (others than needed)'}"
    return way, evicted, str(useless), took, str(waits), str(dead), calls


def main(
    seconds_to_end: Annotated[
        float, typer.Option(help="Grace period of slow victims, in seconds.")
    ] = 3,
    ways: Annotated[str, typer.Option(help="Comma-separated list of ways.")] = ",".join(WAYS),
    patience_s: Annotated[
        float, typer.Option(help="Seconds to wait for pods that are never placed.")
    ] = 8,
) -> None:
    """Print a row for each scenario and way."""
    columns = (
        "scenario",
        "way",
        "evicted",
        "in vain",
        "s to bind",
        "waiting",
        "would die",
        "filter calls",
    )
    typer.echo("| " + " | ".join(columns) + " |")
    typer.echo("|" + "---|" * len(columns))
    with control_plane() as plane:
        for way in ways.split(","):
            with stage_of(plane, way) as stage:
                for scenario in SCENARIOS:
                    if scenario.grace_s == 3.0:
                        scenario = replace(scenario, grace_s=seconds_to_end)
                    outcome = stage.run_patiently(scenario, patience_s + scenario.grace_s)
                    cells = (scenario.name, *row(way, scenario, outcome))
                    typer.echo("| " + " | ".join(cells) + " |")
                    stage.clear()
                    stage.mirror(stage.cluster.names, False)


if __name__ == "__main__":
    typer.run(main)
