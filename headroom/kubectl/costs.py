"""``kubectl headroom costs``: the GPU hours that namespaces held and used, and their costs."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from headroom.kubectl.options import AllNamespaces, Options
from headroom.kubectl.output import Sheet, print_data, show_lines, show_table
from headroom.kubectl.sheet import show_csv
from headroom.kubectl.table import Table

Body = Mapping[str, Any]

#: Header and field of each column: columns of hours and memory, then columns with prices.
_COLUMNS = (
    ("GPU HOURS", "held_gpu_hours"),
    ("USED", "used_gpu_hours"),
    ("IDLE", "idle_gpu_hours"),
    ("NOT MEASURED", "unmeasured_gpu_hours"),
    ("GIB DAYS", "held_gib_days"),
    ("UNUSED", "unused_gib_days"),
)
_PRICED = (("COST", "cost"), ("IDLE COST", "idle_cost"))
#: A report counts as complete if at least this ratio of its time is recorded.
_COMPLETE_RATIO = 0.99


def costs(
    context: typer.Context,
    since: Annotated[
        str,
        typer.Option(
            help="A time, such as 2026-01-31T12:00:00Z, or an age, such as 30d. More than an hour"
            " needs Prometheus (setting prometheus_url)."
        ),
    ] = "1h",
    namespace: Annotated[
        str | None, typer.Option("-n", "--namespace", help="Only this namespace; default: all.")
    ] = None,
    all_namespaces: AllNamespaces = False,
    output: Annotated[
        Sheet | None,
        typer.Option(
            "-o", "--output", help="csv: for a spreadsheet; json and yaml: the whole answer."
        ),
    ] = None,
) -> None:
    """Report the GPU hours that each namespace held, used and left idle, and what they cost."""
    options: Options = context.obj
    body = options.api().get("costs", since=since, namespace=None if all_namespaces else namespace)
    if output is Sheet.CSV:
        show_csv(body["namespaces"], ["namespace", *body["total"]])
        return
    if print_data(body, output):
        return
    show_table(body, table(body), None, "no pod held a GPU in this time")
    if note := incomplete(body):
        show_lines([note])


def table(body: Body) -> Table:
    """Return a row for each namespace, and the total."""
    columns = [*_COLUMNS, *(_PRICED if body["gpu_hour_price"] is not None else ())]
    found = Table(("NAMESPACE", *(header for header, _ in columns)))
    for row in body["namespaces"]:
        cells = (f"{row[field]:,.2f}" for _, field in columns)
        found.add(row["namespace"], *cells)
    total = body["total"]
    text = f"held {total['held_gpu_hours']:,.2f} GPU hours, {total['idle_gpu_hours']:,.2f} idle"
    if body["gpu_hour_price"] is not None:
        text += f"; cost {total['cost']:,.2f}, of which {total['idle_cost']:,.2f} idle"
    found.total = [text] if found.rows else []
    return found


def incomplete(body: Body) -> str:
    """Return a note if only a part of the time is recorded; "" if all of it is."""
    asked_s = body["to_s"] - body["from_s"]
    if body["covered_s"] >= _COMPLETE_RATIO * asked_s:
        return ""
    hours, of = body["covered_s"] / 3600, asked_s / 3600
    return f"only {hours:.1f} of {of:.1f} h are recorded, and the sums cover only these hours"
