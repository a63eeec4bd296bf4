"""``kubectl headroom idle``: pods that hold GPU memory and use no SM, and what that costs."""

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any

import typer

from headroom.contract.quantity import gib
from headroom.kubectl.options import AllNamespaces, Namespace, Options
from headroom.kubectl.output import Output, print_data, show_lines, show_table
from headroom.kubectl.sheet import show_csv
from headroom.kubectl.table import Table
from headroom.kubectl.top import age, counted

Body = Mapping[str, Any]


class By(Enum):
    """A kind of object that `idle` lists."""

    POD = "pod"
    OWNER = "owner"
    NAMESPACE = "namespace"


class Format(Enum):
    JSON = "json"
    YAML = "yaml"
    WIDE = "wide"
    CSV = "csv"


def idle(
    context: typer.Context,
    hours: Annotated[float, typer.Option(min=0, help="Minimum idle time in hours.")] = 1.0,
    held: Annotated[
        str, typer.Option(help="Minimum memory that a pod holds on a GPU: 4Gi.")
    ] = "1Gi",
    by: Annotated[By, typer.Option(help="Print one line for each pod, owner or team.")] = By.POD,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    output: Annotated[
        Format | None,
        typer.Option(
            "-o",
            "--output",
            help="wide: more columns; csv: for a spreadsheet; json or yaml: the whole answer.",
        ),
    ] = None,
) -> None:
    """List pods that hold GPU memory but have used no SM for some time, worst first."""
    options: Options = context.obj
    chosen = options.namespace(namespace, all_namespaces)
    body = options.api().get("idle", hours=f"{hours:g}", held=held, namespace=chosen)
    if output is Format.CSV:
        rows = body[{By.POD: "pods", By.OWNER: "owners", By.NAMESPACE: "teams"}[by]]
        show_csv(rows, [] if rows else ["namespace"])
        return
    if print_data(body, Output(output.value) if output else None):
        return
    where = "" if chosen is None else f" in namespace {chosen}"
    more = "" if chosen is None else "; -A shows pods of all namespaces"
    empty = f"no pod{where} holds {held} or more and is idle for {hours:g} h{more}"
    show_table(body, table(body, by, wide=output is Format.WIDE), None, empty)
    if unmeasured := body["devices_without_sm_activity"]:
        show_lines(
            [f"not checked: {counted(unmeasured, 'device')} without a measurement of SM activity"]
        )


def table(body: Body, by: By, wide: bool = False) -> Table:
    """Return a row for each pod on a device, each owner or each namespace, and the total.

    ``wide`` adds the use, and for pods the owner, the device and the time.
    """
    costs = ["COST"] if body["gpu_hour_price"] is not None else []
    match by:
        case By.POD:
            columns, rows = ["NAMESPACE", "POD", "NODE", "IDLE"], body["pods"]
            more = ["USED", "OWNER", "SINCE", "DEVICE"] if wide else []
        case By.OWNER:
            columns, rows, more = ["NAMESPACE", "OWNER", "PODS"], body["owners"], []
        case By.NAMESPACE:
            columns, rows, more = ["NAMESPACE", "PODS"], body["teams"], []
    found = Table((*columns, "HELD", "GPUS", "GPU DAYS", *costs, *more))
    for row in rows:
        found.add(
            *(row["namespace"], *_cells(row, by), gib(row["held_bytes"])),
            *(
                f"{row['gpu_ratio' if by is By.POD else 'gpus_ratio']:.2f}",
                f"{row['gpu_days']:.2f}",
            ),
            *([f"{row['cost']:,.2f}"] if costs else []),
            *(_wide(row) if more else ()),
        )
    found.total = [_total(body)] if rows else []
    return found


def _cells(row: Body, by: By) -> tuple[str, ...]:
    match by:
        case By.POD:
            return row["name"], row["node"], age(row["idle_s"])
        case By.OWNER:
            return f"{row['kind']}/{row['name']}", str(row["pods"])
        case By.NAMESPACE:
            return (str(row["pods"]),)


def _wide(row: Body) -> tuple[str, ...]:
    used_bytes = row["used_bytes"]
    owner = f"{row['owner_kind']}/{row['owner_name']}" if row["owner_kind"] else "-"
    return (
        "-" if used_bytes is None else gib(used_bytes),
        owner,
        row["idle_since"],
        row["device"],
    )


def _total(body: Body) -> str:
    """Return the sums over all namespaces of the answer."""
    teams = body["teams"]
    pods, gpus = (sum(team[key] for team in teams) for key in ("pods", "gpus_ratio"))
    days = sum(team["gpu_days"] for team in teams)
    text = f"{counted(pods, 'pod')}: {gpus:.2f} GPUs, idle for {days:.2f} GPU days"
    if body["gpu_hour_price"] is None:
        return text
    return f"{text}, which cost {sum(team['cost'] for team in teams):,.2f}"
