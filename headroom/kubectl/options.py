"""The options that all commands of ``kubectl headroom`` have, and options that several share."""

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from headroom.contract.errors import BadQuantity, shortened
from headroom.contract.quantity import implausible, parse_bytes
from headroom.kubectl.debug_api_client import BAD_INPUT, CommandError, DebugApi, Transport
from headroom.kubectl.output import HEADERS, JsonPath, Output, show
from headroom.kubectl.transport import NAMESPACE, default_namespace, transport_for
from headroom.version import own_version

_DURATION = re.compile(r"(?:(\d{1,4})h)?(?:(\d{1,6})m)?(?:(\d{1,8})s)?")


def timeout_seconds(text: str) -> float:
    """Parse option ``--timeout``, such as 90s, 5m or 1h30m. Raises ``CommandError``."""
    match = _DURATION.fullmatch(text)
    if not match or not text:
        raise CommandError(
            f"--timeout: {text!r} is not a duration. Example: --timeout 5m", BAD_INPUT
        )
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(3600 * hours + 60 * minutes + seconds)


@dataclass(frozen=True, slots=True)
class Options:
    """The options that all commands have."""

    server: str | None
    token: str | None
    ca: str | None
    kubeconfig: str | None
    context: str | None
    headroom_namespace: str
    #: Whether ``server`` comes from the variable HEADROOM_SERVER.
    server_of_variable: bool = False

    def transport(self) -> Transport:
        """Return the transport that the options select. Raises ``CommandError``."""
        where = self.kubeconfig, self.context, self.headroom_namespace
        return transport_for(self.server, self.token, self.ca, *where)

    def api(self, notify: Callable[[str], object] | None = None) -> DebugApi:
        """Return a client that passes notes to ``notify``, or prints them on stderr. Raises
        ``CommandError``.

        The first note names the server if the command line does not show it."""
        notify = notify or (lambda text: show(text, error=True))
        transport = self.transport()
        if self.server_of_variable:
            notify(f"server: {transport.name} (HEADROOM_SERVER)")
        return DebugApi(transport, notify)

    def namespace(self, given: str | None, every: bool = False) -> str | None:
        """Return the namespace to show, or None for all namespaces."""
        if every:
            return None
        return given or default_namespace(self.kubeconfig, self.context)

    def pod(self, pod: str, namespace: str | None) -> tuple[str, str]:
        """Return namespace and name. A namespace in ``pod`` overrides ``namespace``.

        As in kubectl, ``pod/NAME`` means the pod NAME.
        """
        written, _, name = pod.rpartition("/")
        written = "" if written in ("po", "pod", "pods") else written
        return written or self.namespace(namespace) or "", name


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    show(f"kubectl headroom: {own_version()}")
    raise typer.Exit


def set_options(
    context: typer.Context,
    server: Annotated[
        str | None, typer.Option(envvar="HEADROOM_SERVER", help="Address of the debug API.")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(envvar="HEADROOM_TOKEN", help="Bearer token to send with --server."),
    ] = None,
    certificate_authority: Annotated[
        str | None, typer.Option(help="CA certificates in PEM for a --server with https.")
    ] = None,
    kubeconfig: Annotated[
        str | None, typer.Option(help="Path of the kubeconfig. Default: the same as kubectl.")
    ] = None,
    kube_context: Annotated[
        str | None, typer.Option("--context", help="Context of the kubeconfig.")
    ] = None,
    headroom_namespace: Annotated[
        str, typer.Option(help="Namespace of Headroom's console.")
    ] = NAMESPACE,
    no_headers: Annotated[
        bool, typer.Option("--no-headers", help="Print tables without headers and totals.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Store the options that all commands have. An option on the command line overrides the
    variable HEADROOM_SERVER."""
    HEADERS.set(not no_headers)
    of_variable = _is_variable(context, "server")
    if of_variable and (kubeconfig or kube_context):
        server, of_variable = None, False
    # The doctor declares both options itself. The options of all commands are its defaults.
    context.default_map = {"doctor": {"kubeconfig": kubeconfig, "context": kube_context}}
    context.obj = Options(
        *(server, token, certificate_authority, kubeconfig, kube_context, headroom_namespace),
        server_of_variable=of_variable,
    )


def _is_variable(context: typer.Context, name: str) -> bool:
    """Return whether an option has its value from an environment variable."""
    source: Any = context.get_parameter_source(name)
    return source is not None and source.name == "ENVIRONMENT"


def note_implausible(vram: str) -> None:
    """Print a note on stderr if the amount of option ``--vram`` is implausibly small."""
    with contextlib.suppress(BadQuantity):
        if why := implausible(parse_bytes(vram)):
            show(f"--vram: {shortened(vram)} {why}. Example: --vram 8Gi", error=True)


Namespace = Annotated[
    str | None,
    typer.Option("-n", "--namespace", help="Namespace of the pods. Default: the context's."),
]
AllNamespaces = Annotated[
    bool, typer.Option("-A", "--all-namespaces", help="Show pods of all namespaces.")
]
Limit = Annotated[int | None, typer.Option(min=1, max=100_000, help="Maximum number of lines.")]
Since = Annotated[
    str | None, typer.Option(help="A time, such as 2026-01-31T12:00:00Z, or an age, such as 10m.")
]
#: Formats that kubectl evaluates.
_TEMPLATES = "jsonpath=", "jsonpath-as-json=", "go-template="


def _output(formats: Sequence[Output], help: str) -> Any:
    """Return option ``--output`` with these formats and the formats that kubectl evaluates."""
    words = [each.value for each in formats]

    def parsed(text: str) -> Output | JsonPath:
        text = text.removeprefix("=")  # kubectl accepts -o=json
        if text.startswith(_TEMPLATES):
            return JsonPath(text)
        if text not in words:
            raise typer.BadParameter(
                f"{text!r} is not one of {', '.join(words)}, jsonpath=TEMPLATE. Example: -o json"
            )
        return Output(text)

    def completed(incomplete: str) -> list[str]:
        return [word for word in (*words, "jsonpath=") if word.startswith(incomplete)]

    return typer.Option(
        *("-o", "--output"),
        parser=parsed,
        metavar="FORMAT",
        autocompletion=completed,
        help=f"{help} jsonpath=TEMPLATE: as kubectl, from the whole answer.",
    )


# Typer accepts no union. The values are of type ``Output | JsonPath | None``.
Format = Annotated[
    Any,
    _output(
        (Output.JSON, Output.YAML, Output.WIDE), "json, yaml: the whole answer. wide: more columns."
    ),
]
NameFormat = Annotated[
    Any,
    _output(
        tuple(Output),
        "json, yaml: the whole answer. wide: more columns. name: only TYPE/NAME.",
    ),
]
DataFormat = Annotated[
    Any,
    _output((Output.JSON, Output.YAML), "json, yaml: the whole answer."),
]
PodOrWorkload = Annotated[
    str,
    typer.Argument(
        help="Name of the pod, namespace/name, or a workload: deploy/NAME, sts/NAME, job/NAME,"
        " cj/NAME."
    ),
]
