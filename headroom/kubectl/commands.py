"""The commands of ``kubectl headroom``. Each calls the debug API and prints the answer.

Only ``cordon``, ``uncordon`` and ``defrag --apply`` change anything. Exit statuses: 0 after an
answer; 1 if the object does not exist, a pod of a what-if does not fit, no moves were found, or a
pod was not evicted or moved; 2 after an error on the command line, even if the debug API finds it;
3 without an answer, because the debug API cannot be reached, failed, or does not authorize the
user."""

import contextlib
import sys
from typing import Annotated

import typer

from headroom.kubectl import tables
from headroom.kubectl.cluster_changes import Cluster, Created
from headroom.kubectl.cordon_commands import cordon, uncordon
from headroom.kubectl.costs import costs
from headroom.kubectl.debug_api_client import CommandError
from headroom.kubectl.defaults import lines as default_lines
from headroom.kubectl.defrag import defrag
from headroom.kubectl.follow import Changes
from headroom.kubectl.help import (
    EXPLAIN,
    FOLLOW,
    HELP_NAMES,
    MAINTAIN,
    MEMORY,
    PLAN,
    GroupedHelp,
)
from headroom.kubectl.idle import idle
from headroom.kubectl.options import (
    AllNamespaces,
    Format,
    Limit,
    NameFormat,
    Namespace,
    Options,
    PodOrWorkload,
    Since,
    note_implausible,
    set_options,
)
from headroom.kubectl.output import (
    Output,
    not_checked,
    note_more,
    note_unread,
    print_data,
    show,
    show_details,
    show_json,
    show_lines,
    show_table,
)
from headroom.kubectl.quota import quota
from headroom.kubectl.recommend import recommend
from headroom.kubectl.score_command import score
from headroom.kubectl.top_command import NO_NODES, no_pods, top
from headroom.kubectl.whatif import whatif
from headroom.kubectl.why import why as explained
from headroom.kubectl.workload import explain_workload, pod_key, workload_of

app = typer.Typer(
    cls=GroupedHelp,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=HELP_NAMES,
    help="Show which pods hold GPU memory, and why pods wait. Only cordon, uncordon and"
    " defrag --apply change anything.",
    epilog="Exit status: 0: answered; 1: the object does not exist, a pod of a what-if does not"
    " fit, no moves were found, or a pod was not evicted or moved; 2: an error on the command line;"
    " 3: Headroom's console or the API server cannot be reached or does not answer.",
)


app.callback()(set_options)


app.command(rich_help_panel=MEMORY)(top)


@app.command(rich_help_panel=MEMORY)
def capacity(
    context: typer.Context,
    vram: Annotated[
        str, typer.Option(help="Memory of one pod, as in annotation headroom.gpu/vram: 20Gi.")
    ],
    gpus: Annotated[int, typer.Option(help="GPUs of one pod.")] = 1,
    resource: Annotated[
        str | None,
        typer.Option(
            help="Resource that the pods request; default: the first of setting resources without"
            " a wildcard."
        ),
    ] = None,
    tolerate: Annotated[
        str | None, typer.Option(help="Keys of taints that the pods tolerate: a,b.")
    ] = None,
    by_node: Annotated[bool, typer.Option("--by-node", help="Print a line for each node.")] = False,
    output: Format = None,
) -> None:
    """Count how many pods of a size fit now, and show whether the fleet is full or fragmented."""
    options: Options = context.obj
    note_implausible(vram)
    asked = {"resource": resource, "tolerate": tolerate, "by_node": by_node or None}
    body = options.api().get("capacity", vram=vram, count=gpus, **asked)
    if print_data(body, output):
        return
    show_lines([body["message"]])
    show_details(tables.reason_lines([*body["reasons"], *body["ineligible"]]))
    show_details([not_checked(body)])
    wide = output is Output.WIDE
    table = tables.capacity_by_node(body, wide) if by_node else tables.classes(body)
    show_table(body, table, None, NO_NODES)


@app.command(rich_help_panel=MEMORY)
def pending(
    context: typer.Context,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    limit: Limit = None,
    output: NameFormat = None,
) -> None:
    """List the pods that wait for a GPU, each with the memory that it lacks."""
    options: Options = context.obj
    chosen = options.namespace(namespace, all_namespaces)
    body = options.api().get("pending", namespace=chosen, limit=limit)
    table = tables.pending(body, wide=output is Output.WIDE)
    show_table(body, table, output, no_pods("waits for a GPU", chosen))
    note_more(body)


app.command(rich_help_panel=MEMORY)(quota)


@app.command(rich_help_panel=EXPLAIN)
def why(
    context: typer.Context, pod: PodOrWorkload, namespace: Namespace = None, output: Format = None
) -> None:
    """Explain why a pod waits, or why it is on its node, and suggest what to change.

    For a workload, such as deploy/llama or job/train, its pods are listed, and a waiting pod is
    explained.
    """
    options: Options = context.obj
    if workload := workload_of(pod):
        of = options.namespace(namespace) or ""

        def listed(*of_workload: str) -> list[Created]:
            return Cluster(options.kubeconfig, options.context).pods_of(*of_workload)

        lines, bodies = explain_workload(options.api(), of, *workload, listed)
        for body in bodies:
            if print_data(body, output):
                return
            lines += ["", *explained(body, output is Output.WIDE)]
        show_lines(lines)
        return
    body = options.api().get("explain", pod="/".join(options.pod(pod, namespace)))
    if not print_data(body, output):
        show_lines(explained(body, output is Output.WIDE))


app.command(rich_help_panel=EXPLAIN)(score)


@app.command(rich_help_panel=EXPLAIN)
def decisions(
    context: typer.Context,
    pod: Annotated[
        str | None,
        typer.Option(help="Only decisions about this pod: name, namespace/name, or deploy/NAME."),
    ] = None,
    node: Annotated[
        str | None, typer.Option(help="Only decisions that chose this node or bound to it.")
    ] = None,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    since: Since = None,
    would_reject: Annotated[
        bool,
        typer.Option(
            "--would-reject",
            help="Only decisions that mode enforce would have rejected, with their sums.",
        ),
    ] = False,
    limit: Limit = None,
    output: NameFormat = None,
) -> None:
    """List decisions about pods, newest first."""
    options: Options = context.obj
    api = options.api()
    if pod is not None:
        pod, chosen = pod_key(options, api, pod, namespace), None
    else:
        chosen = options.namespace(namespace, all_namespaces)
    body = api.get(
        "decisions",
        namespace=chosen,
        pod=pod,
        node=node,
        since=since,
        would_reject="true" if would_reject else None,
        limit=limit,
    )
    table = tables.decisions(body, wide=output is Output.WIDE)
    where = "" if chosen is None else f" in namespace {chosen}; -A shows all namespaces"
    show_table(body, table, output, f"no such decision is on record{where}")
    note_unread(body)
    note_more(body)


app.command(rich_help_panel=PLAN)(whatif)


@app.command(rich_help_panel=PLAN)
def defaults(
    context: typer.Context, namespace: Namespace = None, all_namespaces: AllNamespaces = False
) -> None:
    """Suggest default requests of namespaces, from the measured use of their pods.

    Prints a script of kubectl annotate commands, and changes nothing. Each amount is the largest
    use of a GPU by a running pod since it started, plus 10 %, rounded up to 256 MiB. Pods that have
    ended do not count, so run it under load. If fewer than 3 measured pods of a namespace have run
    for an hour, its line is only a comment.
    """
    options: Options = context.obj
    chosen = options.namespace(namespace, all_namespaces)
    if not (found := default_lines(options.api().get("drift"), chosen)):
        show(no_pods("has a GPU", chosen), error=True)
    for line in found:
        show(line)


@app.command(rich_help_panel=PLAN)
def drift(
    context: typer.Context,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    output: NameFormat = None,
) -> None:
    """Compare each reservation with reality: the predicted and actual devices, and the use."""
    options: Options = context.obj
    body = options.api().get("drift")
    chosen = options.namespace(namespace, all_namespaces)
    table = tables.drift(body, chosen, wide=output is Output.WIDE)
    show_table(body, table, output, no_pods("has a reservation", chosen))


app.command(rich_help_panel=PLAN)(idle)
app.command(rich_help_panel=PLAN)(costs)
app.command(rich_help_panel=PLAN)(recommend)
app.command(rich_help_panel=MAINTAIN)(cordon)
app.command(rich_help_panel=MAINTAIN)(uncordon)
app.command(rich_help_panel=MAINTAIN)(defrag)


@app.command(rich_help_panel=FOLLOW)
def log(
    context: typer.Context,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Print new events until Ctrl-C.")
    ] = False,
    since: Since = None,
    output: Format = None,
) -> None:
    """List changes: reservations, decisions, reports, devices and missed predictions."""
    options: Options = context.obj
    if not follow:
        body = options.api().get("events", follow=False, since=since)
        table = tables.feed_events(body, wide=output is Output.WIDE)
        show_table(body, table, output, "no events are kept")
        return
    notes = set[str]()

    def note_once(text: str) -> None:
        if text not in notes:
            notes.add(text)
            show(text, error=True)

    changes = Changes(lambda: options.api(note_once), lambda text: show(text, error=True))
    with contextlib.suppress(KeyboardInterrupt):
        for event in changes.since(since):
            show("  ".join(tables.feed_event(event)))


@app.command(rich_help_panel=FOLLOW)
def ui(
    context: typer.Context,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1, or 0 for any free port.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Show the console's page in a browser, with your own permissions."""
    import webbrowser  # slow to import

    from headroom.kubectl.ui import Page, show_page

    options: Options = context.obj
    try:
        page = Page(options.transport(), port)
    except (OSError, OverflowError) as err:
        raise CommandError(f"--port: cannot listen on 127.0.0.1:{port}: {err}", 2) from err
    show_page(page, webbrowser.open if browser else lambda url: None)


@app.command(rich_help_panel=FOLLOW)
def snapshot(
    context: typer.Context,
    redact: Annotated[bool, typer.Option("--redact", help="Replace names with numbers.")] = False,
) -> None:
    """Print all inputs of decisions as JSON, for a bug report. See headroom replay."""
    options: Options = context.obj
    show_json(options.api().get("snapshot", redact=redact))


def main(name: str = "kubectl headroom") -> None:
    """Run the command line. ``name`` is the command as the user typed it."""
    # Names and reasons can contain characters that the terminal cannot show.
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        app(prog_name=name)
    except CommandError as err:
        show(f"{name}: {err}", error=True)
        raise SystemExit(err.exit_code) from err
