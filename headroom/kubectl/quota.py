"""``kubectl headroom quota``: the ResourceQuotas that limit GPU memory."""

from collections.abc import Mapping
from typing import Any

import typer

from headroom.contract.quantity import gib
from headroom.kubectl.options import AllNamespaces, DataFormat, Namespace, Options
from headroom.kubectl.output import show_table
from headroom.kubectl.table import Table

Body = Mapping[str, Any]


def quota(
    context: typer.Context,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    output: DataFormat = None,
) -> None:
    """List the quotas of GPU memory, with the use that they count and the reservations."""
    options: Options = context.obj
    chosen = options.namespace(namespace, all_namespaces)
    body = options.api().get("quotas", namespace=chosen)
    where = "" if chosen is None else f" of namespace {chosen}"
    more = "" if chosen is None else "; -A shows all namespaces"
    show_table(body, table(body), output, f"no ResourceQuota{where} limits GPU memory{more}")


def table(body: Body) -> Table:
    """Return a row for each quota. Quotas that are used up are highlighted."""
    found = Table(("NAMESPACE", "QUOTA", "USED", "HARD", "LEFT", "RESERVED"))
    for row in body["quotas"]:
        used_bytes, hard_bytes = row["used_bytes"], row["hard_bytes"]
        found.add(
            row["namespace"],
            row["name"],
            gib(used_bytes),
            gib(hard_bytes),
            gib(max(0, hard_bytes - used_bytes)),
            gib(row["reserved_bytes"]),
            bad=used_bytes >= hard_bytes,
        )
    return found
