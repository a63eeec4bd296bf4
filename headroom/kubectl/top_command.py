"""The command ``kubectl headroom top``: tables, and a live view of the terminal with --watch."""

from typing import Annotated

import typer

from headroom.kubectl import tables, top_pods
from headroom.kubectl import top as top_tables
from headroom.kubectl.debug_api_client import BAD_INPUT, CommandError
from headroom.kubectl.help import Subject
from headroom.kubectl.options import AllNamespaces, Format, Namespace, Options
from headroom.kubectl.output import Output, show_details, show_table
from headroom.kubectl.top import SortBy
from headroom.kubectl.watch import keep_watching
from headroom.kubectl.watch_frame import Choice
from headroom.kubectl.watched_fleet import Order

NO_NODES = (
    "no GPU nodes are known: do agents run? To check: kubectl -n headroom-system get pods; "
    "kubectl headroom doctor"
)


def top(
    context: typer.Context,
    what: Annotated[
        Subject,
        typer.Argument(
            parser=Subject.parsed,
            metavar="WHAT",
            autocompletion=Subject.names,
            help="Print a line for each of these.",
        ),
    ] = "node",  # type: ignore[assignment]  # parsed
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    sort_by: Annotated[
        SortBy,
        typer.Option(
            help="worst: overcommitted first, then those that take no pods, then the fullest;"
            " headroom: the least first; reserved, used: the most first."
        ),
    ] = SortBy.WORST,
    search: Annotated[
        str | None,
        typer.Option(
            help="Only nodes with this text in a name, model, reason or, without --watch, pod."
        ),
    ] = None,
    troubled: Annotated[
        bool,
        typer.Option(
            "--troubled",
            help="Only nodes that take no pods, or have an unhealthy, cordoned or overcommitted"
            " GPU; with --watch, those with any problem.",
        ),
    ] = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            "-w",
            help="Keep nodes or GPUs on the terminal, with an hour of history, until q or Ctrl-C.",
        ),
    ] = False,
    output: Format = None,
) -> None:
    """Show reserved, used and free memory by node, GPU, pod or GPU model, the worst first."""
    options: Options = context.obj
    wide = output is Output.WIDE
    if watch:
        _watch(options, what, sort_by, search, troubled, output)
        return
    if what is Subject.MODEL:
        if search or troubled or sort_by is not SortBy.WORST:
            raise CommandError(
                "--search, --troubled and --sort-by apply to nodes: remove them for top model", 2
            )
        body = options.api().get("fleet")
        show_table(body, top_tables.models(body, wide), output, NO_NODES)
        if output in (None, Output.WIDE):
            show_details(tables.reason_lines(body["closed"]))
        return
    body = options.api().get("nodes", search=search, troubled=troubled or None)
    empty = "no node matches" if search or troubled else NO_NODES
    match what:
        case Subject.GPU:
            table = top_tables.devices(body, sort_by, wide)
        case Subject.POD:
            chosen = options.namespace(namespace, all_namespaces)
            table = top_pods.pods(body, chosen, sort_by, wide)
            empty = no_pods("has a GPU", chosen)
        case _:
            table = top_tables.nodes(body, sort_by, wide)
    show_table(body, table, output, empty)


def _watch(
    options: Options,
    what: Subject,
    sort_by: SortBy,
    search: str | None,
    troubled: bool,
    output: Output | None,
) -> None:
    """Run `top --watch` with the options of `top`. Raises ``CommandError``."""
    if what not in (Subject.NODE, Subject.GPU):
        raise CommandError(
            f"--watch lists nodes or GPUs, with the pods of the selected GPU, not {what.value}s. "
            "Example: top gpu --watch",
            BAD_INPUT,
        )
    if output is not None:
        raise CommandError(
            "--watch and --output exclude each other. Example: top gpu --watch", BAD_INPUT
        )
    if sort_by is SortBy.HEADROOM:
        raise CommandError(
            "--watch does not sort by headroom; reserved puts the fullest first. "
            "Example: top --watch --sort-by reserved",
            BAD_INPUT,
        )
    choice = Choice(
        by_node=what is Subject.NODE,
        order=Order(sort_by.value),
        troubled=troubled,
        search=search or "",
    )
    keep_watching(options.api, choice)


def no_pods(does: str, namespace: str | None) -> str:
    """Return the note that no pod of the namespace, or of all (None), does this."""
    if namespace is None:
        return f"no pod {does}"
    return f"no pod in namespace {namespace} {does}; -A shows pods of all namespaces"
