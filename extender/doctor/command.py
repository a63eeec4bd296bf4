"""The doctor's command, `headroom doctor` and `kubectl headroom doctor`: it reads, and changes
nothing, with the rights of whoever runs it."""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from contract.kube import Node
    from extender.config.settings import Settings
    from extender.doctor.findings import Finding


class Output(Enum):
    JSON = "json"
    YAML = "yaml"


def doctor(
    fleet: Annotated[
        Path | None, typer.Option(help="Look at the nodes of this fleet file, without a cluster.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The extender's YAML file of settings.")
    ] = None,
    kubeconfig: Annotated[str | None, typer.Option(help="Else as kubectl finds it.")] = None,
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig.")] = None,
    scheduler_config: Annotated[
        Path | None, typer.Option(help="Look at this KubeSchedulerConfiguration only.")
    ] = None,
    output: Annotated[
        Output | None, typer.Option("-o", "--output", help="Else a line for each finding.")
    ] = None,
) -> None:
    """Say what costs the cluster safety or memory, and what to do about it.

    The exit status is 1 if there is a warning, 2 if nothing could be looked at.
    """
    # Slow to import, and `kubectl headroom` has this command beside others.
    from extender.config.fleet_file import load_fleet
    from extender.config.loading import load_settings
    from extender.doctor.findings import Weight, line, warnings_first
    from extender.doctor.offline import diagnose, diagnose_around, diagnose_scheduler, fleet_events
    from extender.errors import BadSettings, NotSynced

    try:
        settings = load_settings(config)
        if scheduler_config:
            nodes = _nodes(settings, fleet, kubeconfig, context)
            found = diagnose_scheduler(settings, scheduler_config, nodes)
        elif fleet:
            found = diagnose(settings, fleet_events(load_fleet(fleet)))
        else:
            # What talks to a cluster is an extra.
            from extender.doctor.collect import list_cluster, list_surroundings, nodes_of

            listed = list_cluster(settings, kubeconfig, context)
            around = list_surroundings(settings, nodes_of(listed), kubeconfig, context)
            found = diagnose(settings, listed) + diagnose_around(settings, around)
    except ImportError as err:
        typer.echo(f"headroom: {err}: install headroom-gpu[extender,cluster]", err=True)
        raise typer.Exit(2) from err
    except (BadSettings, NotSynced) as err:
        typer.echo(f"headroom: {err}", err=True)
        raise typer.Exit(2) from err
    found = warnings_first(found)
    if output:
        typer.echo(_dump(found, output), nl=False)
    else:
        for finding in found:
            typer.echo(line(finding))
    if not found:
        typer.echo("headroom: nothing to do, as far as can be seen", err=True)
    if any(finding.weight is Weight.WARNING for finding in found):
        raise typer.Exit(1)


def _nodes(
    settings: "Settings", fleet: Path | None, kubeconfig: str | None, context: str | None
) -> "Sequence[Node]":
    """Returns the nodes with which a scheduler's configuration is compared; none, with a note on
    stderr, if there is no cluster to look at."""
    from extender.config.fleet_file import load_fleet
    from extender.errors import BadSettings, NotSynced

    if fleet:
        return list(load_fleet(fleet).kube_nodes())
    try:
        from extender.doctor.collect import list_nodes

        return list_nodes(kubeconfig, context)
    except (ImportError, BadSettings, NotSynced) as err:
        if kubeconfig or context:
            raise
        typer.echo(f"headroom: not compared with what the nodes offer: {err}", err=True)
        return ()


def _dump(found: "Sequence[Finding]", output: Output) -> str:
    import msgspec

    encode = msgspec.json.encode if output is Output.JSON else msgspec.yaml.encode
    text = encode(found).decode()
    return text if text.endswith("\n") else f"{text}\n"
