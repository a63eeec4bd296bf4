"""Rules of ``headroom doctor --multi-tenant`` about quotas and what they count."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from headroom.contract.errors import BadQuantity
from headroom.contract.gpunode import MAX_REPLICAS, Device
from headroom.contract.quantity import format_bytes, gib, parse_bytes
from headroom.doctor.findings import Finding, Weight
from headroom.doctor.tenant_rights import Object

#: Names under which quotas count GPU memory and disruption budgets.
QUOTA, BUDGETS = "requests.headroom.gpu/vram-bytes", "count/poddisruptionbudgets.policy"
_GIB = 1 << 30


def examine_quotas(
    quotas: Sequence[Object],
    using: Collection[str],
    others: Collection[str],
    devices: Sequence[Device],
) -> Iterator[Finding]:
    """Yield findings about quotas.

    ``using`` are the namespaces with pods that request GPUs, and ``others`` are other users'
    namespaces. ``devices`` are all reported devices. A quota with a scope counts only some pods, so
    it does not limit its namespace.
    """
    whole = [
        each
        for each in quotas
        if not each["spec"].get("scopes") and not each["spec"].get("scopeSelector")
    ]
    limits = _limits(whole)
    do = f"kubectl create quota gpu-memory -n NAMESPACE --hard={QUOTA}=40Gi"
    if unlimited := sorted(set(using) - limits.keys()):
        yield Finding(
            Weight.WARNING,
            tuple(unlimited),
            "pods request GPUs, and no ResourceQuota without a scope limits their GPU memory",
            do,
        )
    total_bytes = sum(each.memory_bytes for each in devices if each.kind == "gpu")
    if huge := sorted(name for name, most in limits.items() if most >= total_bytes > 0):
        yield Finding(
            Weight.WARNING,
            tuple(huge),
            f"the quota of GPU memory limits nothing: all GPUs together have {gib(total_bytes)}",
            f"kubectl edit quota -n NAMESPACE, and lower {QUOTA}",
        )
    if later := sorted(set(others) - limits.keys()):
        yield Finding(
            Weight.ADVICE,
            tuple(later),
            "no quota limits the GPU memory that authors of pods can request",
            f"for namespaces of tenants: {do}",
        )
    full = {each["metadata"]["namespace"] for each in whole if _is_full(each)}
    if exempting := sorted(set(using) - full):
        yield Finding(
            Weight.WARNING,
            tuple(exempting),
            "authors of pods may create disruption budgets, which exempt their pods from eviction "
            "for overuse",
            f"kubectl create quota no-budgets -n NAMESPACE --hard={BUDGETS}=0",
        )


def _limits(quotas: Iterable[Object]) -> dict[str, int]:
    """Return the bytes of GPU memory that each namespace's strictest quota allows."""
    found: dict[str, int] = {}
    for each in quotas:
        text = (each["spec"].get("hard") or {}).get(QUOTA)
        try:
            most_bytes = None if text is None else parse_bytes(str(text))
        except BadQuantity:  # Kubernetes permits numbers that are larger than any memory
            most_bytes = 1 << 63
        if most_bytes is not None:
            name = each["metadata"]["namespace"]
            found[name] = min(most_bytes, found.get(name, most_bytes))
    return found


def _is_full(quota: Object) -> bool:
    """Return whether the quota allows no further disruption budget."""
    most = (quota["spec"].get("hard") or {}).get(BUDGETS)
    used = ((quota.get("status") or {}).get("used") or {}).get(BUDGETS, "0")
    return most is not None and str(most) in ("0", str(used))


def examine_largest(devices: Sequence[Device], setting: object) -> Iterator[Finding]:
    """Yield a finding if the setting ``largest_devices`` lacks a resource that agents report."""
    entries = setting if isinstance(setting, Sequence) else ()
    named = {str(entry).partition("=")[0] for entry in entries}
    missing = [each for each in _suggested(devices) if each.partition("=")[0] not in named]
    if missing:
        yield Finding(
            Weight.WARNING,
            (),
            "setting largest_devices lacks resources, so one node's report changes how much "
            "shares, and pods without an amount, count in the quotas of all namespaces",
            f"add the entries of your largest devices; agents report: {', '.join(missing)}",
        )


def _suggested(devices: Sequence[Device]) -> Iterator[str]:
    """Yield an entry for each resource that permits all these devices."""
    for resource in sorted({each.resource for each in devices if each.resource}):
        of = [each for each in devices if each.resource == resource and each.memory_bytes > 0]
        if not of:
            continue
        most = -(-max(each.memory_bytes for each in of) // _GIB) * _GIB
        replicas = min(most * max(1, each.replicas.total) // each.memory_bytes for each in of)
        text = f"{resource}={format_bytes(most)}"
        yield f"{text}/{min(replicas, MAX_REPLICAS)}" if replicas > 1 else text
