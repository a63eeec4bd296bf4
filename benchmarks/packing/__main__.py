"""Measures how much of a cluster's GPU memory can be reserved, by placement policy.

    python -m benchmarks.packing --policy bestfit --policy fgd --seed 42 --mode vram [--json]

docs/design/packing.md describes the experiments *inflation* and *churn*. Without --nodes and
--pods, it uses the files of the published trace if they are beside the repository, and otherwise a
workload that is generated from the trace's counts."""

import json
import multiprocessing
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.packing import golden, mixes, synthetic
from benchmarks.packing.mixes import MIXES, mix
from benchmarks.packing.play import READ_AT
from benchmarks.packing.product import POLICIES
from benchmarks.packing.rules import RULES
from benchmarks.packing.runs import OTHERS, Run, play
from benchmarks.packing.workload import (
    Node,
    Pod,
    ask,
    read_arrivals,
    read_nodes,
    read_pods,
    read_ranks,
)
from headroom.errors import BadSettings

OPENB = Path("../shared/data/openb")
CHOICES = ("mixed", "one-pool", "steered", "predicted")
MODES = ("milli", "vram")
#: Seeds of the orders if neither a seed nor arrivals are given.
SEEDS = (1, 2, 3)


def main(
    nodes: Annotated[Path | None, typer.Option(help="CSV of nodes.")] = None,
    pods: Annotated[Path | None, typer.Option(help="CSV of pods.")] = None,
    arrivals: Annotated[Path | None, typer.Option(help="CSV of the order of pods.")] = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="Seed of the order of pods. Can be repeated.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Cluster in the arrivals file: full or small.")
    ] = None,
    ranks: Annotated[
        Path | None, typer.Option(help="CSV of the node order for ties, by seed.")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Policy. Can be repeated.")] = None,
    mode: Annotated[str, typer.Option(help="Share devices by memory (vram) or by milli.")] = "vram",
    choice: Annotated[str | None, typer.Option(help=f"One of {', '.join(CHOICES)}.")] = None,
    others: Annotated[
        str | None, typer.Option(help="Who places pods without a GPU: own, bestfit or aside.")
    ] = None,
    mixed: Annotated[
        str | None, typer.Option("--mix", help=f"{', '.join(MIXES)}, or random-1, random-2 ...")
    ] = None,
    churn: Annotated[bool, typer.Option("--churn", help="Let pods end again.")] = False,
    pool_size: Annotated[
        float, typer.Option(min=0.0, help="Unshared memory, as a multiple of the demand for it.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    against: Annotated[
        Path | None, typer.Option("--golden", help="Folder with golden.json to compare with.")
    ] = None,
) -> None:
    """Run the pods through each policy, and print which ratio was admitted."""
    known = [*RULES, *POLICIES]
    check("mode", mode, MODES)
    for name, given, right in (
        ("choice", choice, CHOICES),
        ("others", others, ("own", *OTHERS)),
    ):
        if given is not None:
            check(name, given, right)
    if mixed is not None:
        check_mix(mixed)
    for each in policy or ():
        check("policy", each, known)
        if each in POLICIES and choice == "mixed":
            raise typer.BadParameter(
                f"choice 'mixed' is for the published rules, not for policy {each!r}. "
                "Example: --choice one-pool"
            )
    try:
        if against is not None:
            lines, most = golden.table(against, in_turn)
            typer.echo("\n".join([*lines, f"\nat most {most:.2f} points off"]))
            return
        (there, listed), shown = _workload(nodes, pods)
        listed = sorted(listed, key=lambda pod: pod.name)
        if mixed is not None:
            listed, shown = mix(mixed, listed, there), f"{shown}, mix {mixed}"
        which = cluster or ("small" if nodes and "small" in nodes.stem else "full")
        orders: dict[int, tuple[int, ...]] = dict.fromkeys(seed or SEEDS, ())
        if arrivals is not None:
            orders = read_arrivals(arrivals, len(listed), mode, which, seed or ())
        beside = nodes.parent / "node_ranks.csv" if nodes else OPENB / "node_ranks.csv"
        if ranks is None and arrivals is not None and beside.exists():
            ranks = beside
        winners = read_ranks(ranks, there) if ranks else {}
    except BadSettings as err:
        raise typer.BadParameter(str(err)) from err
    asks = tuple(ask(pod, mode) for pod in listed)
    runs = [
        Run(
            tuple(there),
            asks,
            mode,
            each,
            choice or ("steered" if each in POLICIES else "mixed"),
            others or "own",
            number,
            order,
            winners.get(number, ()),
            churn,
            pool_size,
        )
        for each in policy or known
        for number, order in orders.items()
    ]
    found = list(in_turn(runs))
    if as_json:
        typer.echo(
            json.dumps({"workload": shown, "machine": machine_line(), "runs": found}, indent=1)
        )
        return
    typer.echo(f"{shown}; {machine_line()}; seeds {', '.join(map(str, orders))}\n")
    typer.echo("\n".join(_table(found, churn)))


def machine_line() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def _workload(nodes: Path | None, pods: Path | None) -> tuple[tuple[list[Node], list[Pod]], str]:
    if nodes is None and pods is None and not (OPENB / "nodes.csv").exists():
        shown = "workload made up from the published counts (the trace itself is not here)"
        return (synthetic.nodes(), synthetic.pods()), shown
    nodes, pods = nodes or OPENB / "nodes.csv", pods or OPENB / "pods.csv"
    return (read_nodes(nodes), read_pods(pods)), f"{nodes.name}, {pods.name}"


def check(name: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise typer.BadParameter(f"{name} {given!r} is not one of: {', '.join(known)}")


def check_mix(given: str) -> None:
    if not mixes.known(given):
        raise typer.BadParameter(
            f"mix {given!r} is not one of: {', '.join(MIXES)}, random-1, random-2 and so on"
        )


def in_turn(runs: list[Run], processes: int | None = None) -> list[dict[str, Any]]:
    """Return the results of the runs. By default, there is a process for each CPU."""
    with multiprocessing.Pool(min(len(runs), processes or os.cpu_count() or 1)) as pool:
        return pool.map(play, runs, chunksize=1)


def _table(found: Sequence[dict[str, Any]], churn: bool) -> list[str]:
    if churn:
        columns = ["running %", "rejected %", "overcommits"]
    else:
        columns = [*(f"admitted % @{at}" for at in READ_AT), "idle % @100", "overcommits"]
    lines = [f"| policy | choice | others | {' | '.join(columns)} |"]
    lines.append("|---" * (3 + len(columns)) + "|")
    rows: dict[tuple[str, ...], list[list[float]]] = {}
    for each in found:
        if churn:
            figures = [each["running_pct"], each["rejected_pct"], each["overcommits"]]
        else:
            figures = [*each["admitted_pct"].values(), each["idle_pct_at_100"], each["overcommits"]]
        rows.setdefault((each["policy"], each["choice"], each["others"]), []).append(figures)
    for names, seeds in rows.items():
        cells = [_mean_and_spread(column) for column in zip(*seeds, strict=True)]
        lines.append(f"| {' | '.join(names)} | {' | '.join(cells)} |")
    return lines


def _mean_and_spread(figures: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(figures):.2f}" if len(figures) > 1 else ""
    return f"{statistics.mean(figures):.2f}{spread}"


if __name__ == "__main__":
    typer.run(main)
