"""Compares the rules with published reference results, and reports the differences."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.packing.play import READ_AT
from benchmarks.packing.runs import Run
from benchmarks.packing.workload import (
    ask,
    read_arrivals,
    read_nodes,
    read_pods,
    read_ranks,
)
from headroom.errors import BadSettings

NODES = {"full": "nodes.csv", "small": "nodes_small.csv"}


def runs(folder: Path) -> list[tuple[dict[str, Any], Run]]:
    """Return each reference result of ``golden.json`` with the run that should give the same."""
    try:
        wanted = json.loads((folder / "golden.json").read_text())["runs"]
    except OSError as err:
        raise BadSettings(f"{folder / 'golden.json'} cannot be read: {err.strerror}") from err
    pods = read_pods(folder / "pods.csv")
    nodes = {cluster: tuple(read_nodes(folder / file)) for cluster, file in NODES.items()}
    ranks = {c: read_ranks(folder / "node_ranks.csv", there) for c, there in nodes.items()}
    orders = {
        (cluster, mode): read_arrivals(folder / "arrivals.csv", len(pods), mode, cluster, ())
        for cluster, mode in {(each["cluster"], each["mode"]) for each in wanted}
    }
    return [
        (
            each,
            Run(
                nodes[each["cluster"]],
                tuple(ask(pod, each["mode"]) for pod in pods),
                each["mode"],
                each["policy"],
                "mixed",
                "own",
                each["seed"],
                orders[each["cluster"], each["mode"]][each["seed"]],
                ranks[each["cluster"]].get(each["seed"], ()),
            ),
        )
        for each in wanted
    ]


def deviations(wanted: dict[str, Any], found: dict[str, Any]) -> dict[str, float]:
    """Return figure -> percentage points by which it differs."""
    off = {
        str(at): found["admitted_pct"][str(at)] - wanted["admitted_pct"][str(at)] for at in READ_AT
    }
    off["idle"] = found["idle_pct_at_100"] - wanted["idle_pct_at_100"]
    return {name: round(figure, 2) for name, figure in off.items()}


def table(
    folder: Path, each: Callable[[list[Run]], Iterable[dict[str, Any]]]
) -> tuple[list[str], float]:
    """Return the lines of a table, and the largest difference of any figure."""
    pairs = runs(folder)
    lines = [
        "| cluster | mode | seed | policy | @90 | @95 | @100 | @130 | idle @100 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    most = 0.0
    for (wanted, run), found in zip(pairs, each([run for _, run in pairs]), strict=True):
        off = deviations(wanted, found)
        most = max(most, *(abs(figure) for figure in off.values()))
        cells = " | ".join(f"{figure:+.2f}" for figure in off.values())
        lines.append(f"| {wanted['cluster']} | {run.mode} | {run.seed} | {run.policy} | {cells} |")
    return lines, most
