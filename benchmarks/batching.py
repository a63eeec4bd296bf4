"""Measures what a kube-scheduler loses if its configuration names an extender.

    python -m benchmarks.batching [--nodes 1000] [--pods 300] [--rounds 4]

kube-scheduler 1.35 and newer reuses the scores of the last pod for the next pod if both are alike
(OpportunisticBatching), but not if its configuration has an extender. Nodes are plain objects. The
pods are alike, request no GPU and arrive together. So the extender is never called, and none runs.
Each round prints kube-scheduler's CPU for a pod, with and without the extender's entry, for a
profile with and without default topology spread constraints.
"""

import json
import statistics
from collections import defaultdict
from typing import Annotated, Any

import typer

from benchmarks.real.stage import UNHURRIED, Bound, Stage, pending, stage
from tests.controlplane import SCHEDULER_NAME, built

#: Default constraints (kube-scheduler's own or none), and whether there is an extender.
VARIANTS = {
    "own constraints": (False, False),
    "own constraints, extender": (False, True),
    "no constraints": (True, False),
    "no constraints, extender": (True, True),
}
NO_CONSTRAINTS = {
    "name": "PodTopologySpread",
    "args": {"defaultingType": "List", "defaultConstraints": []},
}
EXTENDER = {
    "urlPrefix": "http://127.0.0.1:1",
    "filterVerb": "filter",
    "bindVerb": "bind",
    "nodeCacheCapable": True,
    "managedResources": [{"name": "nvidia.com/gpu"}],
}


def configuration(on: Stage, without_constraints: bool, extended: bool) -> dict[str, Any]:
    kubeconfig = str(on.plane.kubeconfig("scheduler-of-the-tests"))
    plugins = [NO_CONSTRAINTS] if without_constraints else []
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": kubeconfig, **UNHURRIED},
        "leaderElection": {"leaderElect": False},
        "profiles": [{"schedulerName": SCHEDULER_NAME, "pluginConfig": plugins}],
        "extenders": [EXTENDER] if extended else [],
    }


def cpu_ms(on: Stage, config: dict[str, Any], pods: int) -> float:
    """Return the CPU milliseconds that kube-scheduler takes for each pod."""
    name = "kube-scheduler"
    file = on.plane.folder / "batching.json"
    file.write_text(json.dumps(config))
    on.plane.spawn(name, str(built(name)[name]), f"--config={file}", "--secure-port=0")
    with Bound(on.plane) as bound:
        on.put([pending("run-first", None)])
        bound.wait(["run-first"])
        names = [f"run-{number:04d}" for number in range(pods)]
        before = on.spent(name)
        on.put(pending(each, None) for each in names)
        bound.wait(names)
        spent = on.spent(name).since(before).of[name]
    on.kill(name)
    on.clear("run-")
    return 1e3 * spent / pods


def main(
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 1000,
    pods: Annotated[int, typer.Option(help="Pods of each run.")] = 300,
    rounds: Annotated[int, typer.Option(help="Runs of each variant.")] = 4,
) -> None:
    found: dict[str, list[float]] = defaultdict(list)
    with stage(nodes, 0) as on:
        for _ in range(rounds):
            for name, (without_constraints, extended) in VARIANTS.items():
                config = configuration(on, without_constraints, extended)
                found[name].append(cpu_ms(on, config, pods))
                typer.echo(f"{name:<26}{found[name][-1]:6.2f} ms", err=True)
    for name, each_ms in found.items():
        each = ", ".join(f"{ms:.2f}" for ms in each_ms)
        typer.echo(f"{name:<26}{statistics.median(each_ms):6.2f} ms for each pod ({each})")


if __name__ == "__main__":
    typer.run(main)
