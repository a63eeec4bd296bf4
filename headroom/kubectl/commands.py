"""The commands of ``kubectl headroom``: each calls the debug API and prints the answer.

The commands only read. Exit status: 0, answered; 1, the object does not exist, or a pod of a
what-if does not fit; 2, an error on the command line, also if the debug API finds it; 3, no answer:
the debug API cannot be reached, failed, or does not let the user read.
"""

import json
import sys
import webbrowser
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import typer

from headroom.kubectl import tables
from headroom.kubectl.debug_api_client import NOT_THERE, CommandError, DebugApi, Transport
from headroom.kubectl.output import Output, note_more, print_data, show_table
from headroom.kubectl.transport import NAMESPACE, Files, default_namespace, transport_for
from headroom.kubectl.ui import Page, show
from headroom.kubectl.why import score as scored
from headroom.kubectl.why import why as explained
from headroom.version import own_version

app = typer.Typer(
    name="kubectl headroom",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Plain help, like that of kubectl. Formatted help takes a third of a command's start.
    rich_markup_mode=None,
    context_settings={"max_content_width": 120},
    help="Show which pods hold GPU memory and why pods wait, from Headroom's debug API.",
)


class Subject(Enum):
    NODE = "node"
    GPU = "gpu"
    POD = "pod"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class _Options:
    server: str | None
    token: str | None
    files: Files
    kubeconfig: str | None
    context: str | None
    headroom_namespace: str

    def transport(self) -> Transport:
        """Return the connection that the options select. Raises ``CommandError``."""
        where = self.kubeconfig, self.context, self.headroom_namespace
        return transport_for(self.server, self.token, self.files, *where)

    def api(self) -> DebugApi:
        """Return a client that prints notes on stderr. Raises ``CommandError``."""
        return DebugApi(self.transport(), lambda text: print(text, file=sys.stderr))  # noqa: T201


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    print(f"kubectl headroom: {own_version()}")  # noqa: T201
    raise typer.Exit


@app.callback()
def _options(
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
    client_certificate: Annotated[
        str | None, typer.Option(help="Client certificate in PEM for --server.")
    ] = None,
    client_key: Annotated[
        str | None, typer.Option(help="Private key of the client certificate in PEM.")
    ] = None,
    kubeconfig: Annotated[
        str | None, typer.Option(help="Path of the kubeconfig; default: as kubectl finds it.")
    ] = None,
    kube_context: Annotated[
        str | None, typer.Option("--context", help="Context of the kubeconfig.")
    ] = None,
    headroom_namespace: Annotated[
        str, typer.Option(help="Namespace of Headroom's console.")
    ] = NAMESPACE,
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    # The doctor has options of the same names.
    context.default_map = {"doctor": {"kubeconfig": kubeconfig, "context": kube_context}}
    files = Files(certificate_authority, client_certificate, client_key)
    context.obj = _Options(server, token, files, kubeconfig, kube_context, headroom_namespace)


Namespace = Annotated[str | None, typer.Option("-n", "--namespace", help="Namespace of the pod.")]
AllNamespaces = Annotated[
    bool, typer.Option("-A", "--all-namespaces", help="Show pods of all namespaces.")
]
Limit = Annotated[int | None, typer.Option(min=1, max=100_000, help="Maximum number of lines.")]
Since = Annotated[
    str | None, typer.Option(help="A time, such as 2026-01-31T12:00:00Z, or an age, such as 10m.")
]
Format = Annotated[
    Output | None, typer.Option("-o", "--output", help="Format of the output; default: a table.")
]


@app.command()
def top(
    context: typer.Context,
    what: Annotated[Subject, typer.Argument(help="Print a line for each of these.")] = Subject.NODE,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    search: Annotated[
        str | None, typer.Option(help="Only nodes with this text in a name, model, pod or reason.")
    ] = None,
    troubled: Annotated[
        bool, typer.Option(help="Only nodes that take no pods or have an unhealthy device.")
    ] = False,
    fullest: Annotated[
        bool, typer.Option(help="Sort by fullness, the fullest node first; default: by name.")
    ] = False,
    output: Format = None,
) -> None:
    """Show reserved, used and free memory by node, GPU, pod or GPU model."""
    options: _Options = context.obj
    if what is Subject.MODEL:
        if search or troubled or fullest:
            raise CommandError(
                "--search, --troubled and --fullest apply to nodes: remove them for top model", 2
            )
        body = options.api().get("fleet")
        show_table(body, tables.models(body), output)
        if output in (None, Output.WIDE):
            _print_lines(tables.reason_lines(body["closed"]))
        return
    order = "fullest" if fullest else None
    body = options.api().get("nodes", search=search, troubled=troubled or None, order=order)
    wide = output is Output.WIDE
    match what:
        case Subject.NODE:
            table = tables.nodes(body, wide)
        case Subject.GPU:
            table = tables.devices(body, wide)
        case Subject.POD:
            table = tables.pods(body, _namespace(options, namespace, all_namespaces), wide)
    show_table(body, table, output)


@app.command()
def why(
    context: typer.Context,
    pod: Annotated[str, typer.Argument(help="Name of the pod, or namespace/name.")],
    namespace: Namespace = None,
    output: Format = None,
) -> None:
    """Explain why a pod waits or why it is on its node, with suggestions."""
    options: _Options = context.obj
    body = options.api().get("explain", "pods", *_pod(options, pod, namespace))
    if not print_data(body, output):
        print("\n".join(explained(body, output is Output.WIDE)))  # noqa: T201


@app.command()
def pending(context: typer.Context, limit: Limit = None, output: Format = None) -> None:
    """List the pods that wait for a GPU, each with what it lacks."""
    options: _Options = context.obj
    body = options.api().get("pending", limit=limit)
    show_table(body, tables.pending(body), output)
    note_more(body)


@app.command()
def decisions(
    context: typer.Context,
    pod: Annotated[
        str | None, typer.Option(help="Only decisions about this pod: namespace/name.")
    ] = None,
    node: Annotated[
        str | None, typer.Option(help="Only decisions that chose this node or bound to it.")
    ] = None,
    since: Since = None,
    limit: Limit = None,
    output: Format = None,
) -> None:
    """List decisions about pods, the newest first."""
    options: _Options = context.obj
    body = options.api().get("decisions", pod=pod, node=node, since=since, limit=limit)
    show_table(body, tables.decisions(body, wide=output is Output.WIDE), output)
    note_more(body)


@app.command()
def drift(
    context: typer.Context,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    output: Format = None,
) -> None:
    """Compare each reservation with reality: predicted and actual devices, and use."""
    options: _Options = context.obj
    body = options.api().get("drift")
    chosen = _namespace(options, namespace, all_namespaces)
    show_table(body, tables.drift(body, chosen, wide=output is Output.WIDE), output)


@app.command()
def score(
    context: typer.Context,
    pod: Annotated[str, typer.Argument(help="Name of the pod, or namespace/name.")],
    node: Annotated[
        str | None, typer.Option(help="Name of any node; default: the best node.")
    ] = None,
    namespace: Namespace = None,
    output: Format = None,
) -> None:
    """Explain why a pod fits on a node or not: every check, every term, and the rank."""
    options: _Options = context.obj
    api, pod_path = options.api(), _pod(options, pod, namespace)
    if node is None:
        nearest = api.get("explain", "pods", *pod_path)["nearest"]
        if not nearest:
            raise CommandError(
                f"no node is known for pod {'/'.join(pod_path)}: set --node", NOT_THERE
            )
        node = str(nearest[0]["node"])
    body = api.get("score", pod="/".join(pod_path), node=node)
    if not print_data(body, output):
        print("\n".join(scored(body)))  # noqa: T201


@app.command()
def capacity(
    context: typer.Context,
    vram: Annotated[
        str, typer.Option(help="Memory of one pod, as in annotation headroom.gpu/vram: 20Gi.")
    ],
    gpus: Annotated[int, typer.Option(help="GPUs of one pod.")] = 1,
    resource: Annotated[
        str | None, typer.Option(help="Resource that the pods request; default: the usual one.")
    ] = None,
    tolerate: Annotated[
        str | None, typer.Option(help="Keys of taints that the pods tolerate: a,b.")
    ] = None,
    by_node: Annotated[bool, typer.Option("--by-node", help="Print a line for each node.")] = False,
    output: Format = None,
) -> None:
    """Count the pods of a size that fit now, and show whether the fleet is full or fragmented."""
    options: _Options = context.obj
    asked = {"resource": resource, "tolerate": tolerate, "by_node": by_node or None}
    body = options.api().get("capacity", vram=vram, count=gpus, **asked)
    if print_data(body, output):
        return
    print(body["message"])  # noqa: T201
    _print_lines(tables.reason_lines([*body["reasons"], *body["ineligible"]]))
    _print_lines([_unchecked(body)])
    show_table(body, tables.capacity_by_node(body) if by_node else tables.classes(body), None)


@app.command()
def whatif(
    context: typer.Context,
    pods: Annotated[int, typer.Option(help="Number of new pods.")] = 0,
    vram: Annotated[str, typer.Option(help="Memory of each new pod: 20Gi.")] = "",
    drain: Annotated[list[str] | None, typer.Option(help="A node to drain.")] = None,
    add: Annotated[
        list[str] | None, typer.Option(help="NODE=COUNT: add this many nodes like NODE.")
    ] = None,
    replicas: Annotated[
        list[str] | None, typer.Option(help="NODE=COUNT: replicas of each GPU of NODE.")
    ] = None,
    release: Annotated[
        list[str] | None, typer.Option(help="NAMESPACE/POD: a pod that ends.")
    ] = None,
    output: Format = None,
) -> None:
    """Simulate changes without making them. Exit status 1 if a pod would not fit."""
    options: _Options = context.obj
    asked = {
        "pods": [{"count": pods, "vram": vram}] if pods else [],
        "drain": drain or [],
        "add": [{"like": node, "count": count} for node, count in _counts("--add", add)],
        "replicas": dict(_counts("--replicas", replicas)),
        "release": release or [],
    }
    body = options.api().post("whatif", body=asked)
    if not print_data(body, output):
        print(body["message"])  # noqa: T201
        _print_lines([_unchecked(body)])
        show_table(body, tables.moves(body), None)
    if body["rejected"]:
        raise typer.Exit(NOT_THERE)


@app.command()
def log(
    context: typer.Context,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Print new events until Ctrl-C.")
    ] = False,
    since: Since = None,
    output: Format = None,
) -> None:
    """List changes: reservations, decisions, reports, devices and missed predictions."""
    options: _Options = context.obj
    if not follow:
        body = options.api().get("events", follow=False, since=since)
        show_table(body, tables.feed_events(body, wide=output is Output.WIDE), output)
        return
    try:
        for line in options.api().lines("events", since=since):
            if line.startswith("data:"):
                event = json.loads(line.removeprefix("data:"))
                print("  ".join(filter(None, tables.feed_event(event))), flush=True)  # noqa: T201
    except KeyboardInterrupt:
        return


@app.command()
def snapshot(
    context: typer.Context,
    redact: Annotated[bool, typer.Option(help="Replace names with numbers.")] = False,
) -> None:
    """Print all inputs of decisions as JSON, for a bug report; see headroom replay."""
    options: _Options = context.obj
    print(json.dumps(options.api().get("snapshot", redact=redact)))  # noqa: T201


@app.command()
def ui(
    context: typer.Context,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0: any free port.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Show the console's page in a browser, with your own permissions."""
    options: _Options = context.obj
    try:
        page = Page(options.transport(), port)
    except (OSError, OverflowError) as err:
        raise CommandError(f"--port: cannot listen on 127.0.0.1:{port}: {err}", 2) from err
    show(page, webbrowser.open if browser else lambda url: None)


def _print_lines(lines: list[str]) -> None:
    for line in lines:
        print(f"  {line}")  # noqa: T201


def _unchecked(body: Mapping[str, Any]) -> str:
    return f"not checked: {', '.join(body['not_checked'])}"


def _pod(options: _Options, pod: str, namespace: str | None) -> tuple[str, str]:
    """Return namespace and name; the namespace in ``pod`` overrides ``namespace``."""
    written, _, name = pod.rpartition("/")
    return written or _namespace(options, namespace, False) or "", name


def _counts(flag: str, given: list[str] | None) -> Iterator[tuple[str, int]]:
    """Parse NODE=COUNT arguments. Raises ``CommandError``."""
    for each in given or ():
        node, _, count = each.rpartition("=")
        if not node or not count.isascii() or not count.isdecimal() or len(count) > 6:
            raise CommandError(f"{flag}: {each!r} is not NODE=COUNT. Example: {flag} gpu-a=4", 2)
        yield node, int(count)


def _namespace(options: _Options, given: str | None, every: bool) -> str | None:
    """Return the namespace to show; None for all namespaces."""
    if every:
        return None
    return given or default_namespace(options.kubeconfig, options.context)


def main() -> None:
    """Run the command line."""
    try:
        app()
    except CommandError as err:
        print(f"kubectl headroom: {err}", file=sys.stderr)  # noqa: T201
        raise SystemExit(err.exit_code) from err
