"""The command `headroom doctor`, also `kubectl headroom doctor`.

It only reads, with the permissions of the user who runs it.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headroom.contract.printable import printable, printable_json, printable_lines

if TYPE_CHECKING:
    from headroom.contract.kube import Node
    from headroom.contract.watched import WatchEvent
    from headroom.doctor.findings import Finding
    from headroom.doctor.recent_requests import RecentRequests
    from headroom.runtime.settings.settings import Settings


class Output(Enum):
    JSON = "json"
    YAML = "yaml"


def doctor(
    command: typer.Context,
    fleet: Annotated[
        Path | None, typer.Option(help="Examine the nodes of this fleet file, without a cluster.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The extender's settings file (YAML).")
    ] = None,
    kubeconfig: Annotated[
        str | None, typer.Option(help="Path of the kubeconfig. Default: the same as kubectl.")
    ] = None,
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig.")] = None,
    scheduler_config: Annotated[
        Path | None, typer.Option(help="Examine only this KubeSchedulerConfiguration file.")
    ] = None,
    output: Annotated[
        Output | None,
        typer.Option("-o", "--output", help="Output format. Default: one line for each finding."),
    ] = None,
    plugin_config: Annotated[
        bool,
        typer.Option(
            "--plugin-config",
            help="Print only the device plugin's ConfigMap with the advised replicas.",
        ),
    ] = False,
    multi_tenant: Annotated[
        bool,
        typer.Option(
            "--multi-tenant",
            help="Also find settings that are unsafe if tenants do not trust each other.",
        ),
    ] = False,
) -> None:
    """Find problems that endanger pods or waste GPU memory, and show how to fix them.

    The exit status is 1 if there is a warning, and 2 if nothing could be examined.
    """
    from headroom.errors import BadSettings, NotSynced

    try:
        # These modules are slow to import, and not installed with the client alone.
        from headroom.doctor.environment import examine_environment
        from headroom.doctor.findings import Weight, line, warnings_first
        from headroom.doctor.node_rules import advised_plugin_config, examine_nodes
        from headroom.doctor.scheduler_config import examine_scheduler_file
        from headroom.runtime.settings.loading import load_settings
        from headroom.version import own_version

        settings = load_settings(config)
        if multi_tenant and (fleet or scheduler_config or plugin_config):
            raise BadSettings(
                "--multi-tenant examines a cluster; leave out --fleet, --scheduler-config and "
                "--plugin-config. Example: headroom doctor --multi-tenant"
            )
        if not fleet and not scheduler_config:
            _name_cluster(command, kubeconfig, context)
        if plugin_config:
            events = _events(settings, fleet, kubeconfig, context)
            recent = _recent(command, fleet, kubeconfig, context)
            _print_plugin_config(advised_plugin_config(settings, events, recent))
            return
        if scheduler_config:
            nodes = _nodes(settings, fleet, kubeconfig, context)
            found = examine_scheduler_file(scheduler_config, settings, nodes)
        elif fleet:
            found = examine_nodes(settings, _events(settings, fleet, kubeconfig, context))
        else:
            from headroom.doctor.collect import list_cluster, list_environment, nodes_of

            listed = list_cluster(settings, kubeconfig, context)
            environment = list_environment(settings, nodes_of(listed), kubeconfig, context)
            recent = _recent(command, fleet, kubeconfig, context)
            found = examine_nodes(settings, listed, recent, environment.profiles)
            found += examine_environment(environment, settings, own_version())
            if multi_tenant:
                from headroom.doctor.tenants import examine_tenants, list_tenancy

                found += examine_tenants(
                    list_tenancy(settings, listed, kubeconfig, context), settings.agent_namespace
                )
    except ImportError as err:
        typer.echo(f"headroom: {err}; install it: pip install 'headroom-gpu[extender]'", err=True)
        raise typer.Exit(2) from err
    except (BadSettings, NotSynced) as err:
        typer.echo(printable(f"headroom: {err}"), err=True)
        raise typer.Exit(2) from err
    found = warnings_first(found)
    if output:
        typer.echo(_dump(found, output), nl=False)
    else:
        for finding in found:
            typer.echo(printable(line(finding)))
    if not found:
        typer.echo("headroom: no findings", err=True)
    if any(finding.weight is Weight.WARNING for finding in found):
        raise typer.Exit(1)


def _name_cluster(command: typer.Context, kubeconfig: str | None, context: str | None) -> None:
    """Print which cluster is examined if the other commands ask another server."""
    from headroom.client import kubeconfig as kubeconfigs

    if command.obj is None or not command.obj.server:
        return
    with contextlib.suppress(kubeconfigs.BadKubeconfig):  # reported when the cluster is listed
        server = kubeconfigs.find(kubeconfig, context).cluster["server"]
        typer.echo(
            f"headroom: the doctor examines the kubeconfig's cluster, {printable(server)}; only "
            f"the pods of the last hours come from {printable(command.obj.server)}",
            err=True,
        )


def _events(
    settings: "Settings", fleet: Path | None, kubeconfig: str | None, context: str | None
) -> "Sequence[WatchEvent]":
    """Return the objects of the cluster, or of the fleet file."""
    if fleet:
        return _fleet_events(fleet)
    from headroom.doctor.collect import list_cluster

    return list_cluster(settings, kubeconfig, context)


def _fleet_events(file: Path) -> "Sequence[WatchEvent]":
    """Return the events that add the nodes and namespaces of a fleet file, which has no pods."""
    from headroom.contract.kube import Namespace, Node
    from headroom.contract.watched import GPUNodeSeen, Relisted
    from headroom.runtime.settings.fleet_file import load_fleet

    fleet, now_s = load_fleet(file), time.monotonic()
    return [
        Relisted(Namespace, tuple(fleet.kube_namespaces()), now_s),
        Relisted(Node, tuple(fleet.kube_nodes()), now_s),
        *(GPUNodeSeen(gpunode, now_s) for gpunode in fleet.gpunodes(datetime.now(UTC))),
    ]


def _recent(
    command: typer.Context, fleet: Path | None, kubeconfig: str | None, context: str | None
) -> "RecentRequests":
    """Return the requests of the pods of the last hours.

    If the console cannot be read, return no requests, and print the reason on stderr.
    """
    from headroom.doctor.recent_requests import NO_RECENT, recent_requests
    from headroom.kubectl.debug_api_client import CommandError
    from headroom.kubectl.options import Options
    from headroom.kubectl.transport import NAMESPACE

    if fleet:
        return NO_RECENT
    given = command.obj or Options(None, None, None, None, None, NAMESPACE)
    try:
        return recent_requests(replace(given, kubeconfig=kubeconfig, context=context).api())
    except CommandError as err:
        why = str(err)
    except (KeyError, TypeError, ValueError) as err:
        why = f"the console's answer cannot be read: {err!r}"
    typer.echo(
        f"headroom: advice on replicas counts only pods that exist now: {printable(why)}", err=True
    )
    return NO_RECENT


def _print_plugin_config(text: str) -> None:
    if text:
        typer.echo(printable_lines(text), nl=False)
    else:
        typer.echo(
            "headroom: no node needs another number of replicas, or fewer than 5 GPU containers of "
            "each resource request an amount of memory",
            err=True,
        )


def _nodes(
    settings: "Settings", fleet: Path | None, kubeconfig: str | None, context: str | None
) -> "Sequence[Node]":
    """Return the nodes with which a kube-scheduler configuration is compared.

    If they cannot be listed, return no nodes, and print the reason on stderr. With ``kubeconfig``
    or ``context``, raise the error instead."""
    from headroom.errors import BadSettings, NotSynced
    from headroom.runtime.settings.fleet_file import load_fleet

    if fleet:
        return list(load_fleet(fleet).kube_nodes())
    try:
        from headroom.doctor.collect import list_nodes

        return list_nodes(kubeconfig, context)
    except (ImportError, BadSettings, NotSynced) as err:
        if kubeconfig or context:
            raise
        typer.echo(
            f"headroom: the configuration was not compared with the nodes' resources: {err}",
            err=True,
        )
        return ()


def _dump(found: "Sequence[Finding]", output: Output) -> str:
    import msgspec
    import yaml

    if output is Output.JSON:
        return f"{printable_json(msgspec.json.encode(found).decode())}\n"
    return yaml.safe_dump(msgspec.to_builtins(found), sort_keys=False)
