"""``kubectl headroom recommend``: requests from the recorded memory peaks of containers.

A life is one run of a container on one GPU.
"""

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Annotated, Any

import typer

from headroom.contract.annotations import VRAM
from headroom.contract.commands import command, commented
from headroom.contract.quantity import format_bytes, gib
from headroom.kubectl.options import AllNamespaces, Namespace, Options
from headroom.kubectl.output import Output, print_data, show, show_lines, show_table
from headroom.kubectl.sheet import show_csv
from headroom.kubectl.table import STATE, Table

Body = Mapping[str, Any]

#: Maps each kind whose pod template can be patched to the path of the annotations in the template.
_TEMPLATES: dict[str, tuple[str, ...]] = {
    "Deployment": ("spec", "template", "metadata", "annotations"),
    "StatefulSet": ("spec", "template", "metadata", "annotations"),
    "DaemonSet": ("spec", "template", "metadata", "annotations"),
    "CronJob": ("spec", "jobTemplate", "spec", "template", "metadata", "annotations"),
}


#: Columns of a spreadsheet without rows.
_IDENTITY = ("namespace", "owner_kind", "owner_name", "container", "model")


class Format(Enum):
    JSON = "json"
    YAML = "yaml"
    WIDE = "wide"
    PATCH = "patch"
    CSV = "csv"


def recommend(
    context: typer.Context,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    output: Annotated[
        Format | None,
        typer.Option(
            "-o",
            "--output",
            help="wide: more columns; patch: commands that set the requests; csv: for a"
            " spreadsheet; json or yaml: the whole answer.",
        ),
    ] = None,
) -> None:
    """Recommend requests for workloads, from the recorded memory peaks of their containers."""
    options: Options = context.obj
    chosen = options.namespace(namespace, all_namespaces)
    accepted = None if output in (Format.PATCH, Format.CSV) else "true"
    body = options.api().get("recommendations", namespace=chosen, accepted=accepted)
    if output is Format.PATCH:
        for line in patches(body):
            show(line)
        return
    if output is Format.CSV:
        show_csv(body["recommendations"], [] if body["recommendations"] else _IDENTITY)
        return
    if print_data(body, Output(output.value) if output else None):
        return
    where = "" if chosen is None else f" in namespace {chosen}"
    more = "" if chosen is None else "; -A shows all namespaces"
    empty = f"no memory peaks of containers are recorded{where}{more}. Does the recorder run?"
    show_table(body, table(body, wide=output is Format.WIDE), None, empty)
    show_lines([*totals(body), *settings(body)])


def totals(body: Body) -> list[str]:
    """Return how much each team would free, and what accepting all recommendations changes."""
    teams = sorted(body["teams"], key=lambda each: -each["reclaimable_bytes"])
    several = len(teams) > 1
    lines = [f"{each['namespace']} would free {gib(each['reclaimable_bytes'])}" for each in teams]
    found = body.get("accepted")
    return [*(lines if several else []), *([f"If accepted: {found['message']}"] if found else [])]


def table(body: Body, wide: bool = False) -> Table:
    """Return a row for each container on a device model.

    ``wide`` adds the quantile, the highest peak and the program.
    """
    columns = [
        "NAMESPACE",
        "OWNER",
        "CONTAINER",
        "MODEL",
        "PODS",
        "REQUEST",
        "RECOMMENDED",
        "FREES",
    ]
    columns += ["QUANTILE", "HIGHEST", "PROGRAM"] if wide else []
    found = Table((*columns, STATE))
    for each in body["recommendations"]:
        more = (
            _amount(each["quantile_bytes"]),
            _amount(each["highest_bytes"]),
            each["program"] or "-",
        )
        found.add(
            *(each["namespace"], owner(each), each["container"], each["model"], str(each["pods"])),
            _amount(each["current_bytes"]),
            _amount(each["request_bytes"]),
            gib(each["reclaimable_bytes"]) if each["pods"] and each["request_bytes"] else "-",
            *(more if wide else ()),
            each["message"],
            bad=each["reclaimable_bytes"] < 0,
        )
    freed = sum(team["reclaimable_bytes"] for team in body["teams"])
    if found.rows:
        found.total = [f"lower requests would free {gib(freed)}"]
    return found


def owner(each: Body) -> str:
    """Return the owner as text. The name of a family ends with ``*``."""
    return f"{each['owner_kind'].lower()}/{each['owner_name']}{'*' if each['family'] else ''}"


def settings(body: Body) -> list[str]:
    """Return a line for each owner with the setting that limits its program's memory."""
    lines = [
        f"{each['namespace']} {owner(each)}: {each['setting']}"
        for each in body["recommendations"]
        if each["setting"]
    ]
    return list(dict.fromkeys(lines))


def patches(body: Body) -> Iterator[str]:
    """Yield a script of ``kubectl patch`` that sets the recommended requests, with comments.

    The largest request of all device models counts. If a container has no recommendation, its owner
    is not changed.
    """
    by_owner: dict[tuple[str, str, str], list[Body]] = {}
    for each in body["recommendations"]:
        key = each["namespace"], each["owner_kind"], each["owner_name"]
        by_owner.setdefault(key, []).append(each)
    if not by_owner:
        yield commented("no memory peaks of containers are recorded: nothing to patch")
    for (namespace, kind, name), rows in by_owner.items():
        if missing := [each for each in rows if each["request_bytes"] is None]:
            yield commented(f"{namespace} {owner(rows[0])}: {missing[0]['message']}")
            continue
        for each in rows:
            yield commented(
                f"{namespace} {owner(each)}, {each['container']} on {each['model']}: "
                f"{each['message']}"
            )
            if each["setting"]:
                yield commented(f"  {each['setting']}")
        text = annotation(rows)
        if kind not in _TEMPLATES or rows[0]["family"]:
            yield commented(f"  set {VRAM}: {text} in its manifest")
            continue
        patch: Any = {VRAM: text}
        for step in reversed(_TEMPLATES[kind]):
            patch = {step: patch}
        body_text = json.dumps(patch, separators=(",", ":"))
        where = "-n", namespace, "patch", kind.lower(), name
        yield command("kubectl", *where, "--type=merge", "-p", body_text)


def annotation(rows: list[Body]) -> str:
    """Return the annotation for the containers in these rows, which all have the same owner."""
    amounts: dict[str, int] = {}
    for each in rows:
        name = each["container"]
        amounts[name] = max(amounts.get(name, 0), each["request_bytes"])
    if len(amounts) == 1:
        return format_bytes(*amounts.values())
    return ",".join(f"{name}={format_bytes(count)}" for name, count in amounts.items())


def _amount(count_bytes: int | None) -> str:
    return "-" if count_bytes is None else gib(count_bytes, up=True)
