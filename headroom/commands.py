"""The command line of ``headroom``."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
import uvloop

from headroom.certs.commands import certs, copy_certs
from headroom.contract.printable import printable, printable_json
from headroom.convert.command import convert
from headroom.doctor.command import doctor
from headroom.errors import BadSettings, NotSynced
from headroom.not_installed import missing
from headroom.planner.command import app as plan
from headroom.runtime.memory_policy import limit_heap
from headroom.runtime.settings.loading import check_settings, load_settings
from headroom.runtime.settings.reload import Origin
from headroom.runtime.settings.settings import Settings
from headroom.runtime.settings.settings_files import read_settings

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Headroom: makes Kubernetes aware of GPU memory.",
)


@app.callback()
def _configure() -> None:
    """Log to stderr, one JSON object per line."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


class LogLevel(Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Config = Annotated[
    Path | None,
    typer.Option(
        help="YAML file of settings, or a folder of them. HEADROOM_... variables override them."
    ),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on.")]
VerbsHost = Annotated[str | None, typer.Option(help="Address of kube-scheduler's port.")]
DebugHost = Annotated[str | None, typer.Option(help="Address of the debug API's port.")]
InsecureVerbs = Annotated[
    bool | None,
    typer.Option(
        "--insecure-verbs", help="Accept bind calls without a certificate, on loopback only."
    ),
]
VerbsPort = Annotated[
    int | None, typer.Option(help="kube-scheduler's port, or 0 for any free port.")
]
DebugPort = Annotated[int | None, typer.Option(help="Debug API's port, or 0 for any free port.")]
DebugOpen = Annotated[
    bool | None,
    typer.Option("--debug-open", help="Serve the debug API to all processes of this machine."),
]
DebugTlsCert = Annotated[
    Path | None, typer.Option(help="PEM certificate. With it, the debug API serves only TLS.")
]
DebugTlsKey = Annotated[Path | None, typer.Option(help="PEM private key of the certificate.")]
TlsCert = Annotated[
    Path | None, typer.Option(help="PEM certificate; kube-scheduler's port then serves only TLS.")
]
TlsKey = Annotated[Path | None, typer.Option(help="PEM private key of the certificate.")]
TlsClientCa = Annotated[
    Path | None, typer.Option(help="PEM file of CAs. Clients need a certificate from one of them.")
]
Level = Annotated[LogLevel, typer.Option(help="Minimum log level.")]


@app.command()
def serve(
    embedded: Annotated[
        Path | None,
        typer.Option(help="Serve the nodes of this fleet file from memory, without a cluster."),
    ] = None,
    config: Config = None,
    host: Host = None,
    verbs_host: VerbsHost = None,
    debug_host: DebugHost = None,
    insecure_verbs: InsecureVerbs = None,
    verbs_port: VerbsPort = None,
    debug_port: DebugPort = None,
    debug_open: DebugOpen = None,
    debug_tls_cert: DebugTlsCert = None,
    debug_tls_key: DebugTlsKey = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Serve kube-scheduler's calls and the debug API from one process."""
    with _started(locals()) as (settings, origin):
        limit_heap()
        # Import only what is needed, because the imports are slow.
        if embedded is None:
            from headroom.serve.extender_and_console import serve_both

            uvloop.run(serve_both(settings, typer.echo, origin=origin))
            return
        from headroom.runtime.settings.fleet_file import load_fleet
        from headroom.serve.embedded import serve_embedded

        uvloop.run(serve_embedded(settings, load_fleet(embedded), typer.echo, origin))


@app.command()
def extender(
    config: Config = None,
    host: Host = None,
    verbs_host: VerbsHost = None,
    debug_host: DebugHost = None,
    insecure_verbs: InsecureVerbs = None,
    verbs_port: VerbsPort = None,
    debug_port: DebugPort = None,
    debug_open: DebugOpen = None,
    debug_tls_cert: DebugTlsCert = None,
    debug_tls_key: DebugTlsKey = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Serve kube-scheduler's calls. A second port serves health, metrics and the journal."""
    with _started(locals()) as (settings, origin):
        limit_heap()
        from extender.process import serve_extender

        uvloop.run(serve_extender(settings, typer.echo, origin=origin))


@app.command()
def console(
    config: Config = None,
    host: Host = None,
    debug_host: DebugHost = None,
    debug_port: DebugPort = None,
    debug_open: DebugOpen = None,
    debug_tls_cert: DebugTlsCert = None,
    debug_tls_key: DebugTlsKey = None,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Serve the debug API and its page, which only read the cluster."""
    with _started(locals()) as (settings, origin):
        limit_heap()
        from headroom.console.process import serve_console

        uvloop.run(serve_console(settings, typer.echo, origin=origin))


@app.command()
def webhook(config: Config = None, host: Host = None, log_level: Level = LogLevel.INFO) -> None:
    """Serve the admission webhook."""
    with _started(locals()) as (settings, origin):
        from headroom.webhook.process import serve_webhook

        uvloop.run(serve_webhook(settings, typer.echo, origin=origin))


@app.command()
def recorder(
    config: Config = None,
    host: Host = None,
    debug_host: DebugHost = None,
    debug_port: DebugPort = None,
    debug_tls_cert: DebugTlsCert = None,
    debug_tls_key: DebugTlsKey = None,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Record the memory peaks of containers in VRAMProfiles. The debug port serves probes and
    metrics."""
    with _started(locals()) as (settings, origin):
        from headroom.recorder.process import serve_recorder

        uvloop.run(serve_recorder(settings, typer.echo, origin=origin))


@app.command()
def device_taints(
    config: Config = None,
    host: Host = None,
    debug_host: DebugHost = None,
    debug_port: DebugPort = None,
    debug_tls_cert: DebugTlsCert = None,
    debug_tls_key: DebugTlsKey = None,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Taint DRA devices whose use exceeds their claims. The debug port serves probes and
    metrics."""
    with _started(locals()) as (settings, origin):
        from headroom.dra_taints.process import serve_device_taints

        uvloop.run(serve_device_taints(settings, typer.echo, origin=origin))


@contextlib.contextmanager
def _started(given: Mapping[str, Any]) -> Iterator[tuple[Settings, Origin]]:
    """Set the log level, load the settings and yield them. ``given`` has the command's arguments.

    Report errors on stderr. Exit with 2 for invalid settings, and with 1 for errors of the machine.
    """
    number = logging.getLevelNamesMapping()[given["log_level"].name]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(number))
    flags = {name: value for name, value in given.items() if name in Settings.model_fields}
    origin = Origin(given["config"], dict(os.environ), flags)
    try:
        yield load_settings(origin.path, **flags), origin
    except ImportError as err:
        typer.echo(f"headroom: {missing(err, 'extender')}", err=True)
        raise typer.Exit(2) from err
    except BadSettings as err:
        for line in str(err).splitlines():
            typer.echo(f"headroom: {line}", err=True)
        raise typer.Exit(2) from err
    except OSError as err:
        typer.echo(printable(f"headroom: {err}"), err=True)
        raise typer.Exit(1) from err


@app.command()
def overlays(
    types: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TYPE[=COUNTxMEMORY]]...",
            help="Instance types. Default: the types of the cluster's GPU nodes.",
        ),
    ] = None,
    plugin_config: Annotated[
        typer.FileText | None,
        typer.Option(help="Configuration of the device plugin on nodes of the named types."),
    ] = None,
    nodepool: Annotated[str | None, typer.Option(help="Only for this NodePool.")] = None,
    mirror: Annotated[
        bool, typer.Option(help="Also add headroom.gpu/vram, for the setting mirror_vram.")
    ] = True,
    config: Config = None,
    kubeconfig: Annotated[
        str | None, typer.Option(help="Path of the kubeconfig. Default: the same as kubectl.")
    ] = None,
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig.")] = None,
) -> None:
    """Print Karpenter's NodeOverlays with the replicas and GPU memory of instance types."""
    from headroom import overlays as karpenter

    try:
        if types:
            source = plugin_config.name if plugin_config else ""
            text = plugin_config.read() if plugin_config else ""
            plugin = karpenter.parse_plugin_config(text, source)
            found = [karpenter.of_type(each, plugin, mirror) for each in types]
        elif plugin_config:
            raise BadSettings(
                "--plugin-config is for named types. Example: headroom overlays g6.xlarge "
                "--plugin-config config.yaml"
            )
        else:
            from headroom.doctor.collect import list_cluster
            from headroom.doctor.node_rules import state_of

            settings = load_settings(config)
            cluster = state_of(settings, list_cluster(settings, kubeconfig, context))
            found = karpenter.of_nodes(cluster, mirror)
            if not found:
                raise BadSettings(
                    "no GPU node with a label node.kubernetes.io/instance-type was found: name the "
                    "types. Example: headroom overlays g6.xlarge"
                )
        documents = "---\n".join(karpenter.overlays(found, nodepool))
    except (BadSettings, NotSynced, UnicodeDecodeError) as err:
        typer.echo(printable(f"headroom: {err}"), err=True)
        raise typer.Exit(2) from err
    typer.echo(documents, nl=False)


app.command()(convert)
app.command()(doctor)
app.add_typer(plan, name="plan")
app.command()(certs)
app.command()(copy_certs)


config_commands = typer.Typer(no_args_is_help=True, help="Check settings files.")
app.add_typer(config_commands, name="config")


@config_commands.callback()
def _with_commands() -> None:
    """Make `check` a subcommand. Otherwise, typer runs a single command without its name."""


@config_commands.command()
def check(
    file: Annotated[
        Path, typer.Argument(help="The extender's settings: a YAML file, or a folder of them.")
    ],
) -> None:
    """List all errors in settings files, each with its line, the reason and an example, or show the
    mode that the files set.

    It reads only these files, no environment variables, and none of the files that they name.
    The exit status is 0 if the extender would start with these settings, and otherwise 2.
    """
    settings, problems = check_settings(file, {}, {})
    for problem in problems:
        typer.echo(printable(str(problem)), err=True)
    if settings is None or problems:
        raise typer.Exit(2)
    place = read_settings(file).places.get(("mode",))
    source = f"set in {place}" if place else "the default, because no file sets it"
    typer.echo(printable(f"{file}: valid, mode: {settings.mode.value} ({source})"))


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="Answer of the debug API to GET /v1/snapshot.")],
    pod: Annotated[
        str | None, typer.Option(help="One pod, as namespace/name. Default: all with a decision.")
    ] = None,
    vram: Annotated[
        str | None, typer.Option(help="Size of a hypothetical pod. Example: 8Gi.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each node's verdict, one line of JSON per pod.")
    ] = False,
) -> None:
    """Recompute the decisions about the pods in a snapshot."""
    import msgspec

    from headroom.console import replay as replaying
    from headroom.console.responses import counted

    try:
        for found in replaying.replay(replaying.load(file), pod, vram):
            if as_json:
                typer.echo(printable_json(msgspec.json.encode(found).decode()))
                continue
            nodes = counted(len(found.verdicts), "node")
            typer.echo(f"{found.pod}: fits on {found.fits} of {nodes}; digest {found.digest}")
            for line in found.lines:
                typer.echo(printable(f"  {line}"))
    except (BadSettings, OSError) as err:
        typer.echo(printable(f"headroom: {err}"), err=True)
        raise typer.Exit(2) from err
