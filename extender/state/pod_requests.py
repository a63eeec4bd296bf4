"""Sums a pod's requests by resource, as kube-scheduler counts them, including GPU replicas.

Amounts are exact decimals because sums are compared. A quantity that cannot be parsed counts as
zero. The API server accepts no such pods.
"""

from collections.abc import Iterable, Mapping
from decimal import Decimal

from contract.kube import Container, Pod
from contract.quantity import MAX_LENGTH

Demands = Mapping[str, Decimal]
_SUFFIXES: Mapping[str, Decimal] = {
    **{name: Decimal(1024) ** (i + 1) for i, name in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"))},
    "Ei": Decimal(1024) ** 6,
    **{name: Decimal(1000) ** (i + 1) for i, name in enumerate(("k", "M", "G", "T", "P", "E"))},
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
}
NOTHING = Decimal(0)
#: Larger amounts are not valid: no node has as much of anything.
MAX_AMOUNT = Decimal("1e30")


def demands(pod: Pod) -> dict[str, Decimal]:
    """Return the sum over containers that run together, or an init container's share if larger."""
    sidecars: dict[str, Decimal] = {}
    initial: dict[str, Decimal] = {}
    for container in pod.spec.init_containers or ():
        requests = _requests(container)
        if container.restart_policy == "Always":
            sidecars = total([sidecars, requests])
        else:
            initial = _larger(initial, total([sidecars, requests]))
    together = total([sidecars, *map(_requests, pod.spec.containers or ())])
    overhead = {name: amount(text) for name, text in (pod.spec.overhead or {}).items()}
    return total([_larger(initial, together), overhead])


def total(parts: Iterable[Demands]) -> dict[str, Decimal]:
    found: dict[str, Decimal] = {}
    for part in parts:
        for name, quantity in part.items():
            found[name] = found.get(name, NOTHING) + quantity
    return found


def amount(quantity: str | int) -> Decimal:
    """Convert a Kubernetes quantity to a number."""
    text = str(quantity)[:MAX_LENGTH]
    for length in (2, 1):
        if (factor := _SUFFIXES.get(text[-length:])) is not None:
            text = text[:-length]
            break
    else:
        factor = Decimal(1)
    try:
        found = Decimal(text)
        return found * factor if abs(found) < MAX_AMOUNT else NOTHING
    except ArithmeticError:
        return NOTHING


def _requests(container: Container) -> dict[str, Decimal]:
    resources = container.resources
    if resources is None:
        return {}
    # A limit without a request is also the request.
    given = {**(resources.limits or {}), **(resources.requests or {})}
    return {name: amount(text) for name, text in given.items()}


def _larger(one: Demands, other: Demands) -> dict[str, Decimal]:
    names = one.keys() | other.keys()
    return {name: max(one.get(name, NOTHING), other.get(name, NOTHING)) for name in names}
