"""Builds the rows of the report from the use of each memory by processes. Pure.

A container has a row for each replica that it holds. Its bytes on a memory are in its first row on
that memory, in the order of device, container and replica. If a process is in a container without a
row on the memory, or if the name of its container is unknown, all bytes of the pod are in the pod's
first row. The other rows have 0, so the sum over a pod's rows is its use.

A pod may use a memory without holding a replica of it, because it chose its device itself, or
because the kubelet has removed the pod while its processes still run. Such a pod has one row,
without a replica.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agent.probes.readings import Container, DeviceReading, HoldingReading, ProcessReading
from headroom.contract.gpunode import PodUse

#: A run of a container, and the bytes that its processes use (None if unknown).
Run = tuple[Container, int | None]


@dataclass(slots=True)
class MemoryUse:
    """The use of one memory by processes."""

    #: Bytes by pod uid, or None if the bytes of a process of the pod are unknown.
    pods: dict[str, int | None] = field(default_factory=dict)
    #: The run of each container, by pod uid and container id.
    runs: dict[str, dict[str, Run]] = field(default_factory=dict)
    outside_pods: list[tuple[ProcessReading, int | None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the report, with the use of the memory by its container alone."""

    use: PodUse
    #: The first device of the memory.
    memory: str
    #: Whether this is the container's first row on the memory.
    is_first: bool
    #: The newest run of the container among the pod's processes on the memory. None if the
    #: container has no process there, or if it is unknown which of the pod's processes belong to
    #: the container.
    container: Container | None = None
    #: Bytes used by this run, 0 if the pod has no process on the memory, or None if the bytes are
    #: unknown.
    container_bytes: int | None = None


def rows_of(
    first: DeviceReading,
    rows: Sequence[tuple[str, HoldingReading]],
    use: MemoryUse | None,
    names: Mapping[str, tuple[str, str]],
) -> Iterable[Row]:
    """Yield the rows of one memory: first a row for each replica, then a row for each other pod
    that uses the memory."""
    holders: dict[str, list[str]] = {}
    for _, holding in rows:
        holders.setdefault(holding.uid, []).append(holding.container)
    #: The run and the bytes of each (pod uid, container), removed when its first row is built.
    parts = {
        (uid, name): part
        for uid, containers in holders.items()
        for name, part in _parts(containers, uid, use).items()
    }
    for uuid, holding in rows:
        used_bytes: int | None = None
        source = holding.source
        part = parts.pop((holding.uid, holding.container), None)
        if use is not None and holding.uid:
            used_bytes = 0 if part is None else part.used_bytes
            source = f"{source},proc,{first.source}"
        use_of_row = PodUse(
            uid=holding.uid,
            device=uuid,
            namespace=holding.namespace,
            name=holding.name,
            container=holding.container,
            replica=holding.replica,
            used_bytes=used_bytes,
            source=source,
        )
        if part is None:
            yield Row(use_of_row, first.uuid, is_first=False)
        else:
            yield Row(use_of_row, first.uuid, True, part.container, part.container_bytes)
    for uid, used_bytes in () if use is None else use.pods.items():
        if uid in holders:
            continue
        namespace, name = names.get(uid, ("", ""))
        use_of_row = PodUse(
            uid=uid,
            device=first.uuid,
            namespace=namespace,
            name=name,
            used_bytes=used_bytes,
            source=f"proc,{first.source}",
        )
        (part,) = _parts([""], uid, use).values()
        yield Row(use_of_row, first.uuid, True, part.container, part.container_bytes)


@dataclass(frozen=True, slots=True)
class _Part:
    """The bytes of a pod on one GPU memory that the first row of a container reports."""

    used_bytes: int | None
    #: The same as ``Row.container``.
    container: Container | None = None
    container_bytes: int | None = None


def _parts(containers: Sequence[str], uid: str, use: MemoryUse | None) -> dict[str, _Part]:
    """Return the part of each container of one pod that has rows on a memory.

    ``containers`` has one name for each row, or a single empty name if the pod holds no replica.
    """
    names = dict.fromkeys(containers)
    if use is None or not uid:
        return dict.fromkeys(names, _Part(None))
    runs = [*use.runs.get(uid, {}).values()]
    if not runs:
        return dict.fromkeys(names, _Part(0, None, 0))  # A pod without processes uses 0 bytes.
    total_bytes = use.pods[uid]
    if total_bytes is not None and all(c.name and c.name in names for c, _ in runs):
        by_name: dict[str, list[Run]] = {name: [] for name in names}
        for run in runs:
            by_name[run[0].name].append(run)
        return {name: _named_part(of_name) for name, of_name in by_name.items()}
    # Only the pod's first row has bytes. If the pod has one container and one run, they are the
    # bytes of that container.
    parts = {name: _Part(0) for name in names} | {containers[0]: _Part(total_bytes)}
    if len(names) == len(runs) == 1:
        (container, run_bytes), name = runs[0], containers[0]
        if container.id and (not container.name or not name or container.name == name):
            parts[name] = _Part(total_bytes, container, run_bytes)
    return parts


def _named_part(runs: Sequence[Run]) -> _Part:
    """Return the report's part about a container with these runs, whose bytes are all known."""
    if not runs:
        return _Part(0, None, 0)
    container, run_bytes = max(runs, key=lambda run: run[0].started_s)
    return _Part(sum(of_run or 0 for _, of_run in runs), container, run_bytes)
