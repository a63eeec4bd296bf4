"""The command ``kubectl headroom top``: prints tables once, or repeatedly with --watch."""

from typing import Annotated, Any

import typer

from headroom.kubectl import tables, top_pods
from headroom.kubectl import top as top_tables
from headroom.kubectl.debug_api_client import BAD_INPUT, NOT_THERE, CommandError, DebugApi
from headroom.kubectl.help import Subject
from headroom.kubectl.options import AllNamespaces, NameFormat, Namespace, Options
from headroom.kubectl.output import Output, show_details, show_table
from headroom.kubectl.table import Table
from headroom.kubectl.top import SortBy
from headroom.kubectl.watch import keep_showing

NO_NODES = (
    "no GPU nodes are known. To check the agents: kubectl -n headroom-system get pods; "
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
            help="Print a line for each of these objects.",
        ),
    ] = "node",  # type: ignore[assignment]  # parsed
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help="Only these objects; for top gpu, the GPUs of these nodes."
        ),
    ] = None,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    sort_by: Annotated[
        SortBy,
        typer.Option(
            help="worst: overcommitted first, then closed to pods, then fullest. headroom: least"
            " first. reserved, used: most first."
        ),
    ] = SortBy.WORST,
    search: Annotated[
        str | None,
        typer.Option(help="Only nodes with this text in a name, model, reason or pod."),
    ] = None,
    troubled: Annotated[
        bool,
        typer.Option(
            "--troubled",
            help="Only nodes that take no pods, or have an unhealthy, cordoned or overcommitted"
            " GPU.",
        ),
    ] = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", "-w", help="Refresh the table on the whole terminal every 2 s until Ctrl-C."
        ),
    ] = False,
    output: NameFormat = None,
) -> None:
    """Show reserved, used and free memory by node, GPU, pod or GPU model, worst first."""
    options: Options = context.obj
    wide = output is Output.WIDE
    if watch and output not in (None, Output.WIDE):
        raise CommandError(
            f"--watch and --output {output.value} cannot be combined. Example: top gpu --watch",
            BAD_INPUT,
        )
    if what is Subject.MODEL and output is Output.NAME:
        raise CommandError("-o name prints nodes and pods. Example: top node -o name", BAD_INPUT)
    if what is Subject.MODEL and (search or troubled or sort_by is not SortBy.WORST):
        raise CommandError(
            "--search, --troubled and --sort-by apply to nodes; remove them for top model",
            BAD_INPUT,
        )
    chosen = options.namespace(namespace, all_namespaces) if what is Subject.POD else None

    def chosen_by_name(name: str) -> bool:
        return not names or name in names

    def read(api: DebugApi) -> tuple[Any, Table]:
        if what is Subject.MODEL:
            body = api.get("fleet")
            body["models"] = [each for each in body["models"] if chosen_by_name(each["model"])]
            return body, top_tables.models(body, wide)
        body = api.all_pages("nodes", search=search, troubled=troubled or None)
        if what is not Subject.POD:
            body["nodes"] = [each for each in body["nodes"] if chosen_by_name(each["name"])]
        match what:
            case Subject.GPU:
                return body, top_tables.devices(body, sort_by, wide)
            case Subject.POD:
                return body, top_pods.pods(body, chosen, sort_by, wide, names or ())
            case _:
                return body, top_tables.nodes(body, sort_by, wide)

    if watch:
        keep_showing(options.api, lambda api: read(api)[1])
        return
    body, table = read(options.api())
    empty = "no node matches" if search or troubled else NO_NODES
    if what is Subject.POD:
        empty = no_pods("has a GPU", chosen)
    at = table.columns.index(what.value.upper() if what is not Subject.GPU else "NODE")
    if missing := sorted({*(names or ())} - {row[at] for row in table.rows}):
        kind = "node" if what is Subject.GPU else what.value
        where = f" in namespace {chosen}" if chosen else ""
        raise CommandError(f"no {kind} {', '.join(missing)} with a GPU{where}", NOT_THERE)
    show_table(body, table, output, empty)
    if what is Subject.MODEL and output in (None, Output.WIDE):
        show_details(tables.reason_lines(body["closed"]))


def no_pods(does: str, namespace: str | None) -> str:
    """Return the note that no pod of the namespace does this. None stands for all namespaces."""
    if namespace is None:
        return f"no pod {does}"
    return f"no pod in namespace {namespace} {does}; -A shows pods of all namespaces"
