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

from extender.app.embedded import serve_embedded
from extender.app.reload import Origin
from extender.certs.command import certs
from extender.certs.copy_command import copy_certs
from extender.config.command import config
from extender.config.fleet_file import load_fleet
from extender.config.loading import load_settings
from extender.doctor.command import doctor
from extender.errors import BadSettings

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
    Path | None, typer.Option(help="YAML file of settings; HEADROOM_... variables override it.")
]
Host = Annotated[str | None, typer.Option(help="Address to listen on.")]
VerbsHost = Annotated[str | None, typer.Option(help="Address of kube-scheduler's port.")]
DebugHost = Annotated[str | None, typer.Option(help="Address of the debug API's port.")]
InsecureVerbs = Annotated[
    bool | None,
    typer.Option(
        "--insecure-verbs", help="Accept bind calls of other machines without a certificate."
    ),
]
VerbsPort = Annotated[int | None, typer.Option(help="kube-scheduler's port; 0: any.")]
DebugPort = Annotated[int | None, typer.Option(help="Debug API's port; 0: any.")]
DebugOpen = Annotated[
    bool | None,
    typer.Option("--debug-open", help="Serve the debug API to all processes of this machine."),
]
DebugTlsCert = Annotated[
    Path | None, typer.Option(help="PEM certificate; the debug API then uses TLS only.")
]
DebugTlsKey = Annotated[Path | None, typer.Option(help="PEM private key of the certificate.")]
TlsCert = Annotated[
    Path | None, typer.Option(help="PEM certificate; kube-scheduler's port then uses TLS only.")
]
TlsKey = Annotated[Path | None, typer.Option(help="PEM private key of the certificate.")]
TlsClientCa = Annotated[
    Path | None,
    typer.Option(help="PEM CAs; clients need a certificate of one of them."),
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
    flags = _flags(locals(), "embedded", "config", "log_level")
    _log_at(log_level)
    with _reported():
        settings = load_settings(config, **flags)
        origin = Origin(config, dict(os.environ), flags)
        if embedded is not None:
            uvloop.run(serve_embedded(settings, load_fleet(embedded), typer.echo, origin))
            return
        # The Kubernetes client is an optional dependency, and slow to import.
        from extender.app.cluster import serve_cluster

        uvloop.run(serve_cluster(settings, typer.echo, origin=origin))


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
    """Serve kube-scheduler's calls, and health, metrics and the journal on a second port."""
    flags = _flags(locals(), "config", "log_level")
    _log_at(log_level)
    _serve_part("extender", config, flags)


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
    """Serve the debug API and its page; read-only."""
    flags = _flags(locals(), "config", "log_level")
    _log_at(log_level)
    _serve_part("console", config, flags)


def _flags(given: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """Return the settings among the arguments of a command."""
    return {name: value for name, value in given.items() if name not in others}


def _serve_part(part: str, config: Path | None, flags: dict[str, Any]) -> None:
    with _reported():
        from extender.app.cluster import Parts, serve_cluster

        settings = load_settings(config, **flags)
        origin = Origin(config, dict(os.environ), flags)
        uvloop.run(serve_cluster(settings, typer.echo, origin=origin, parts=Parts(part)))


@app.command()
def webhook(
    config: Config = None,
    host: Host = None,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Serve the admission webhook."""
    flags = _flags(locals(), "config", "log_level")
    _log_at(log_level)
    with _reported():
        from extender.app.webhook import serve_webhook

        settings = load_settings(config, **flags)
        origin = Origin(config, dict(os.environ), flags)
        uvloop.run(serve_webhook(settings, typer.echo, origin=origin))


def _log_at(level: LogLevel) -> None:
    number = logging.getLevelNamesMapping()[level.name]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(number))


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Report errors on stderr, and exit with 2 for bad settings, 1 for errors of the machine."""
    try:
        yield
    except ImportError as err:
        typer.echo(f"headroom: {err}: install headroom-gpu[extender,cluster]", err=True)
        raise typer.Exit(2) from err
    except BadSettings as err:
        for line in str(err).splitlines():
            typer.echo(f"headroom: {line}", err=True)
        raise typer.Exit(2) from err
    except OSError as err:
        typer.echo(f"headroom: {err}", err=True)
        raise typer.Exit(1) from err


class MemoryUnit(Enum):
    GIB = "GiB"
    MIB = "MiB"


@app.command()
def convert(
    file: Annotated[
        typer.FileText, typer.Option("-f", "--file", help="Manifests, YAML or JSON; -: stdin.")
    ],
    memory_unit: Annotated[
        MemoryUnit,
        typer.Option(help="Unit of aliyun.com/gpu-mem (--memory-unit)."),
    ] = MemoryUnit.GIB,
    scheduler_name: Annotated[
        str | None,
        typer.Option(help="schedulerName; default: remove KAI's and HAMi's."),
    ] = None,
) -> None:
    """Convert manifests for KAI, HAMi or gpushare to Headroom, on stdout.

            understood and left as it was, 2 if the file cannot be read at all.
    Reports on stderr what could not be converted. The exit status is 1 if something was not
        understood and left unchanged, 2 if the file cannot be read.
        understood and left as it was, 2 if the file cannot be read at all.
    """
    from extender.convert.manifests import Options
    from extender.convert.manifests import convert as converted
    from extender.convert.remarks import BadManifest

    unit_bytes = 1 << (30 if memory_unit is MemoryUnit.GIB else 20)
    try:
        result = converted(file.read(), Options(unit_bytes, scheduler_name))
    except (BadManifest, UnicodeDecodeError) as err:
        typer.echo(f"headroom: {file.name}: {err}", err=True)
        raise typer.Exit(2) from err
    typer.echo(result.text, nl=False)
    for found in result.findings:
        at = file.name if found.line is None else f"{file.name}:{found.line}"
        typer.echo(f"{at}: {found.where}: {found.weight.value}: {found.message}", err=True)
    if not result.understood:
        raise typer.Exit(1)


app.command()(doctor)
app.command()(certs)
app.command()(copy_certs)
app.add_typer(config, name="config")


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="Answer of GET /v1/snapshot of the debug API.")],
    pod: Annotated[
        str | None, typer.Option(help="One pod, as namespace/name; default: all with a decision.")
    ] = None,
    vram: Annotated[
        str | None, typer.Option(help="A made-up pod of this size. Example: 8Gi.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each node's verdict, one line of JSON per pod.")
    ] = False,
) -> None:
    """Recompute the decisions about the pods in a snapshot."""
    import msgspec

    from extender.app import replay as replaying

    try:
        for found in replaying.replay(replaying.load(file), pod, vram):
            if as_json:
                typer.echo(msgspec.json.encode(found).decode())
                continue
            nodes = len(found.verdicts)
            typer.echo(f"{found.pod}: fits on {found.fits} of {nodes} nodes; digest {found.digest}")
            for line in found.lines:
                typer.echo(f"  {line}")
    except (BadSettings, OSError) as err:
        typer.echo(f"headroom: {err}", err=True)
        raise typer.Exit(2) from err


def main() -> None:
    app()
