"""Measures the latency of the verbs, compared with only reading and writing their bodies.

    python -m benchmarks.hotpath [--calls 300] [--nodes 100 --nodes 1000 --nodes 5000]
    python -m benchmarks.hotpath --json [--quick] [--nodes F ...] [--pods-per-device F ...]
        [--pod small|256Ki ...] [--form names|objects ...] [--fits all|one|none ...]
        [--verb filter|prioritize|bind|explain|whatif ...] [--calls F] [--best-only]

Without ``--json``, it prints a short table of filter and prioritize, with the time spent in each
step (see ``table``). With ``--json``, it prints every verb in every case (see ``matrix``). Each
option that can be repeated selects a part of the matrix. ``--quick`` selects a part that takes half
a minute."""

import sys
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.hotpath.matrix import QUICK, Choice, encoded, results
from benchmarks.hotpath.table import tabulate


def main(
    calls: Annotated[int | None, typer.Option(min=1, help="Measured calls of each verb.")] = None,
    nodes: Annotated[
        list[int] | None, typer.Option(help="Number of nodes. Can be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the matrix as JSON.")] = False,
    quick: Annotated[bool, typer.Option(help="Only a small part of the matrix.")] = False,
    pods_per_device: Annotated[list[int] | None, typer.Option(help="With --json.")] = None,
    pod: Annotated[list[str] | None, typer.Option(help="With --json: small, 256Ki.")] = None,
    form: Annotated[list[str] | None, typer.Option(help="With --json: names, objects.")] = None,
    fits: Annotated[list[str] | None, typer.Option(help="With --json: all, one, none.")] = None,
    verb: Annotated[list[str] | None, typer.Option(help="With --json: filter, bind ...")] = None,
    best_only: Annotated[bool, typer.Option("--best-only", help="Set filter_best_only.")] = False,
) -> None:
    if not as_json:
        tabulate(calls or 300, nodes or [100, 1_000, 5_000])
        return
    given: dict[str, Any] = {
        "nodes": nodes,
        "pods_per_device": pods_per_device,
        "pods": pod,
        "forms": form,
        "fits": fits,
        "verbs": verb,
        "calls": calls,
        "best_only": best_only,
    }
    chosen = {name: value for name, value in given.items() if value}
    try:
        whole = msgspec.structs.asdict(QUICK if quick else Choice())
        choice = msgspec.convert({**whole, **chosen}, Choice)
    except msgspec.ValidationError as err:
        raise typer.BadParameter(f"{err}. Example: --pod small --form names") from err
    sys.stdout.buffer.write(encoded(results(choice)) + b"\n")


if __name__ == "__main__":
    typer.run(main)
