"""The command ``headroom convert``."""

from enum import Enum
from typing import Annotated

import typer

from headroom.contract.printable import printable


class ConvertTo(Enum):
    HEADROOM = "headroom"
    DRA = "dra"


class MemoryUnit(Enum):
    GIB = "GiB"
    MIB = "MiB"


def convert(
    file: Annotated[
        typer.FileText, typer.Option("-f", "--file", help="Manifests, YAML or JSON; -: stdin.")
    ],
    memory_unit: Annotated[
        MemoryUnit, typer.Option(help="Unit of aliyun.com/gpu-mem (--memory-unit).")
    ] = MemoryUnit.GIB,
    scheduler_name: Annotated[
        str | None, typer.Option(help="schedulerName to set. Default: remove KAI's and HAMi's.")
    ] = None,
    to: Annotated[
        ConvertTo, typer.Option(help="dra: convert Headroom's annotation to DRA claims.")
    ] = ConvertTo.HEADROOM,
) -> None:
    """Convert manifests for KAI, HAMi, gpushare or DRA to Headroom, or from Headroom to DRA.

    Prints the result on stdout, and reports on stderr what it changes and drops. The exit status is
    1 if a part was not understood and left unchanged, or has no equivalent, and 2 if the file
    cannot be read."""
    from headroom.convert.manifests import BadManifest, Options
    from headroom.convert.manifests import convert as converted

    unit_bytes = 1 << (30 if memory_unit is MemoryUnit.GIB else 20)
    try:
        options = Options(unit_bytes, scheduler_name, to is ConvertTo.DRA)
        result = converted(file.read(), options)
    except (BadManifest, UnicodeDecodeError) as err:
        typer.echo(printable(f"headroom: {file.name}: {err}"), err=True)
        raise typer.Exit(2) from err
    typer.echo(result.text, nl=False)
    for found in result.findings:
        at = file.name if found.line is None else f"{file.name}:{found.line}"
        text = f"{at}: {found.where}: {found.outcome.value}: {found.message}"
        typer.echo(printable(text), err=True)
    if not result.complete:
        raise typer.Exit(1)
