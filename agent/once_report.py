"""Formats the output of `headroom agent --once`: the node's devices and their users. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from headroom.contract.gpunode import ContainerLimit, Device, GPUNodeStatus, PodUse
from headroom.contract.printable import printable
from headroom.contract.quantity import gib

_HEAD = ("", "device", "memory", "used", "unattributed", "free", "SM", "health")
#: Columns that are left-aligned. Figures are right-aligned.
_LEFT = {0, 1, 7}
_UNKNOWN = "?"


def table(node: str, status: GPUNodeStatus, pod_sm: Mapping[tuple[str, str], float]) -> str:
    """Return the text for a terminal. ``pod_sm`` maps (pod uid, device) to a share of SM time,
    0..1."""
    rows: list[Sequence[str]] = [_HEAD]
    for device in status.devices:
        rows.append(_row(device))
        rows += [("", f"  {text}") for text in _details(device)]
        rows += _pods(device, status.pods, pod_sm)
        rows += [_limit(row) for row in status.limits if row.device == device.uuid]
        rows += [
            (
                "",
                f"  {printable(p.command) or _UNKNOWN} (pid {p.pid}, no pod)",
                "",
                size(p.used_bytes),
            )
            for p in status.unattributed_processes
            if p.device == device.uuid
        ]
    lines = [_title(node, status), "", *_aligned(rows)]
    lacks = [
        f"  {source.name} {source.state}: {printable(source.message)}"
        for source in status.sources
        if source.state != "ok"
    ]
    if lacks:
        lines += ["", "not in this table:", *lacks]
    return "\n".join(lines) + "\n"


def well(status: GPUNodeStatus) -> bool:
    """Return whether the driver is ready and all devices are healthy."""
    ready = all(c.status == "True" for c in status.conditions if c.type == "DriverReady")
    return ready and all(device.healthy for device in status.devices)


def size(figure: int | None) -> str:
    """Format bytes as GiB, and return "?" if the figure is unknown."""
    return _UNKNOWN if figure is None or figure < 0 else gib(figure)


def _title(node: str, status: GPUNodeStatus) -> str:
    parts = [node, status.observed_at]
    if status.driver_version:
        parts.append(f"driver {status.driver_version}")
    if status.cuda_version:
        parts.append(f"CUDA {status.cuda_version}")
    parts += [c.message for c in status.conditions if c.type == "DriverReady" and c.message]
    if not status.devices:
        parts.append("no devices")
    return "  ".join(parts)


def _row(device: Device) -> Sequence[str]:
    figures = (device.memory_bytes, device.reserved_bytes, device.used_bytes)
    free = None if min(figures) < 0 else figures[0] - figures[1] - figures[2]
    sm = _UNKNOWN
    if device.sm_activity is not None:
        sm = _percent(device.sm_activity.ratio)
    place = str(device.index)
    if device.gpu_instance is not None:
        place += f"/{device.gpu_instance}"
    return (
        place,
        printable(device.model),
        size(device.memory_bytes),
        size(device.used_bytes),
        size(device.unattributed_bytes),
        size(free),
        sm,
        "ok" if device.healthy else f"BAD: {printable(device.health_reason)}",
    )


def _details(device: Device) -> Iterable[str]:
    """Yield the lines below a device with its UUID and, if known, its resource."""
    yield device.uuid
    replicas = device.replicas
    if device.resource:
        how = "not shared" if device.sharing == "none" else device.sharing
        counts = f"{replicas.allocated} of {replicas.total} taken"
        unhealthy = f", {replicas.unhealthy} unhealthy" if replicas.unhealthy else ""
        yield f"{device.resource}, {how}: {counts}{unhealthy}"


def _pods(
    device: Device, rows: Iterable[PodUse], pod_sm: Mapping[tuple[str, str], float]
) -> Iterable[Sequence[str]]:
    shown: set[str] = set()
    for row in rows:
        if row.device != device.uuid:
            continue
        name = f"{row.namespace}/{row.name}" if row.name else f"pod {row.uid}"
        first = row.uid not in shown or not row.uid
        shown.add(row.uid)
        # The SM share belongs to the pod. So do the bytes if the names of its containers are
        # unknown.
        sm = pod_sm.get((row.uid, row.device)) if first else None
        yield (
            "",
            f"  {name} {row.container}".rstrip(),
            "",
            size(row.used_bytes) if first or row.used_bytes else "",
            "",
            "",
            "" if sm is None else _percent(sm),
        )


def _limit(row: ContainerLimit) -> Sequence[str]:
    """Return a row for a limit, with the limit as memory and the driver's count as use."""
    name = f"{row.namespace}/{row.name}" if row.name else f"pod {row.uid}"
    limited = row.soft_bytes is not None or row.hard_bytes is not None
    what = f"  {'limit' if limited else 'count'} of {name} {row.container or row.container_id[:12]}"
    if row.soft_bytes is not None:
        what += f", soft {size(row.soft_bytes)}"
    return "", what, "" if row.hard_bytes is None else size(row.hard_bytes), size(row.used_bytes)


def _percent(ratio: float) -> str:
    return f"{ratio:.0%}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Yield each row as a line whose columns are aligned. A row may have fewer columns than
    others."""
    # The last column needs no width.
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(_HEAD) - 1)]
    for row in rows:
        cells = [
            cell
            if i >= len(widths)
            else cell.ljust(widths[i])
            if i in _LEFT
            else cell.rjust(widths[i])
            for i, cell in enumerate(row)
        ]
        yield "  ".join(cells).rstrip()
