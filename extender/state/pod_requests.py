"""What a pod takes of a node as kube-scheduler counts it: requests by resource, replicas included.

Exact, in fractions: of two sums it is asked which is larger. What cannot be read counts as nothing
where a pod leaves; the API server takes no such pods.
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
#: No node has as much of anything.
MOST = Decimal("1e30")


def demands(pod: Pod) -> dict[str, Decimal]:
    """The sum of what runs together, or an init container's part where that is larger."""
    sidecars: dict[str, Decimal] = {}
    initial: dict[str, Decimal] = {}
    for container in pod.spec.init_containers or ():
        asked = _requests(container)
        if container.restart_policy == "Always":
            sidecars = total([sidecars, asked])
        else:
            initial = _larger(initial, total([sidecars, asked]))
    together = total([sidecars, *map(_requests, pod.spec.containers or ())])
    overhead = {name: amount(text) for name, text in (pod.spec.overhead or {}).items()}
    return total([_larger(initial, together), overhead])


def total(parts: Iterable[Demands]) -> dict[str, Decimal]:
    found: dict[str, Decimal] = {}
    for part in parts:
        for name, asked in part.items():
            found[name] = found.get(name, NOTHING) + asked
    return found


def amount(quantity: str | int) -> Decimal:
    """A Kubernetes quantity as a number."""
    text = str(quantity)[:MAX_LENGTH]
    for length in (2, 1):
        if (factor := _SUFFIXES.get(text[-length:])) is not None:
            text = text[:-length]
            break
    else:
        factor = Decimal(1)
    try:
        found = Decimal(text)
        return found * factor if abs(found) < MOST else NOTHING
    except ArithmeticError:
        return NOTHING


def _requests(container: Container) -> dict[str, Decimal]:
    resources = container.resources
    if resources is None:
        return {}
    # Where only a limit is given, that is what is requested.
    given = {**(resources.limits or {}), **(resources.requests or {})}
    return {name: amount(text) for name, text in given.items()}


def _larger(one: Demands, other: Demands) -> dict[str, Decimal]:
    names = one.keys() | other.keys()
    return {name: max(one.get(name, NOTHING), other.get(name, NOTHING)) for name in names}
