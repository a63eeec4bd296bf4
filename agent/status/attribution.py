"""Decides whose the memory of each device is. Pure.

A *memory* is a device's, or that of a MIG GPU instance, which its compute instances share. On each:

    used = what processes of pods use + unowned

*unowned* is all the rest: what processes of no pod use, and what is used and nobody lists. Where
the two sides do not add up (figures are read a moment apart), strangers are charged with what they
list at least, and more than 64 MiB too much is said.

Bytes are told once. A process belongs to a pod and to one of its containers, but the kubelet names
containers and cgroups number them, so a pod's bytes on a memory stand in its first row there, in
the order of device, container and replica, and its other rows there say 0. Whoever adds the rows of
a pod gets what it uses. A pod that uses a memory of which it holds nothing (it chose its device
itself, or it is gone from the kubelet's lists while its processes live) has a row with no replica.

Nothing is attributed, and unowned is absent, where processes cannot be looked at, where the driver
lists none, and where it does not tell what a pod's process uses.

MPS: where the driver counts clients' memory to the server as well, processes list more than is
used; that much, and no more than the clients list, is taken from the server. Where the clients of a
server list nothing at all, the server's figure is theirs in unknown parts, and so is absent.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from agent.probes.cgroup import is_static
from agent.probes.readings import (
    Degraded,
    DeviceReading,
    HoldingReading,
    MirrorReading,
    ProcessReading,
)
from agent.probes.replica_ids import resolve
from contract.gpunode import MAX_DEVICE_BYTES, Device, PodUse, UnattributedProcess

_Device = TypeVar("_Device", Device, DeviceReading)

#: Figures read a moment apart may differ by that much without a word.
TOLERANCE_BYTES = 64 << 20

#: The kernel keeps 15 characters of a command: the server's and its control daemon's.
_MPS_COMMAND = "nvidia-cuda-mps"


@dataclass(frozen=True, slots=True)
class Attributed:
    pods: list[PodUse]
    #: Device -> bytes; None where they cannot be told from those of pods.
    unattributed: Mapping[str, int | None]
    strangers: list[UnattributedProcess]
    complaints: list[Degraded]


@dataclass(slots=True)
class _Use:
    """What the processes of one memory use."""

    #: Pod -> bytes; None where one of its processes does not tell.
    pods: dict[str, int | None] = field(default_factory=dict)
    strangers: list[tuple[ProcessReading, int | None]] = field(default_factory=list)


def attribute(
    devices: Sequence[DeviceReading],
    used: Mapping[str, int],
    holdings: Iterable[HoldingReading],
    processes: Mapping[int, ProcessReading] | None,
    mirrors: Iterable[MirrorReading] = (),
) -> Attributed:
    """Attribute the memory of each device.

    ``used`` are the devices' own figures where there are any; ``processes`` is None where nobody
    could look at them.
    """
    mirror_uids = {mirror.hash: mirror.uid for mirror in mirrors}
    held = list(_held(devices, holdings, mirror_uids))
    on: dict[str, list[HoldingReading]] = {}
    for uuid, holding in held:
        on.setdefault(uuid, []).append(holding)
    known = {holding.uid for _, holding in held if holding.uid}
    names = {holding.uid: (holding.namespace, holding.name) for _, holding in held if holding.name}
    pods: list[PodUse] = []
    unattributed: dict[str, int | None] = {}
    strangers: list[UnattributedProcess] = []
    complaints: list[Degraded] = []
    for memory in memories(devices):
        uuids = [device.uuid for device in memory]
        used_bytes = max((used[uuid] for uuid in uuids if uuid in used), default=None)
        rows = [
            (uuid, holding)
            for uuid in uuids
            for holding in sorted(on.get(uuid, ()), key=lambda h: (h.container, h.replica))
        ]
        use = _use(memory, used_bytes, processes, known, mirror_uids)
        pods += _rows(memory[0], rows, use, names)
        unattributed |= dict.fromkeys(uuids, None)
        if use is None:
            continue
        strangers += [
            UnattributedProcess(uuids[0], process.pid, _named(process), used_bytes)
            for process, used_bytes in use.strangers
        ]
        left_bytes, too_much = _left(use, used_bytes)
        if left_bytes is not None:
            unattributed |= {**dict.fromkeys(uuids, 0), uuids[0]: left_bytes}
        if too_much:
            complaints.append(Degraded(memory[0].source, "processes list more memory than is used"))
    strangers.sort(key=lambda stranger: -(stranger.used_bytes or 0))
    pods.sort(key=lambda row: (row.uid, row.namespace, row.name))
    return Attributed(pods, unattributed, strangers, complaints)


def memories(devices: Iterable[_Device]) -> list[list[_Device]]:
    """The devices by the memory that they have or share, in their order; each uuid once."""
    found: dict[tuple[str, int | None], list[_Device]] = {}
    for device in {device.uuid: device for device in devices}.values():
        shared = device.kind == "mig" and device.parent is not None
        place = (device.parent or "", device.gpu_instance) if shared else (device.uuid, None)
        found.setdefault(place, []).append(device)
    return list(found.values())


def _held(
    devices: Sequence[DeviceReading],
    holdings: Iterable[HoldingReading],
    mirror_uids: Mapping[str, str],
) -> Iterable[tuple[str, HoldingReading]]:
    """(device, holding under the uid that the API knows), for those of devices of ours."""
    holdings = list(holdings)
    device_of = resolve({holding.replica for holding in holdings}, devices)
    for holding in holdings:
        if uuid := device_of.get(holding.replica):
            uid = mirror_uids.get(holding.uid, holding.uid)
            yield uuid, holding if uid == holding.uid else replace(holding, uid=uid)


def _use(
    memory: Sequence[DeviceReading],
    used_bytes: int | None,
    processes: Mapping[int, ProcessReading] | None,
    known: Collection[str],
    mirror_uids: Mapping[str, str],
) -> _Use | None:
    """What each pod and each stranger uses; None where that cannot be told at all."""
    listed = _listed(memory)
    if processes is None or listed is None:
        return None
    looked: list[ProcessReading] = []
    for pid in listed:
        process = processes.get(pid)
        if process is None or not process.known:
            return None
        looked.append(process)
    figures = _netted(looked, listed, used_bytes)
    use = _Use()
    owners: dict[tuple[str, ...], str | None] = {}
    for process in looked:
        figure = figures[process.pid]
        if process.pods not in owners:
            owners[process.pods] = owner(process, known, mirror_uids)
        uid = owners[process.pods]
        if uid is None:
            use.strangers.append((process, figure))
        else:
            use.pods[uid] = _plus(use.pods.get(uid, 0), figure)
    return use


def _listed(memory: Sequence[DeviceReading]) -> dict[int, int | None] | None:
    """pid -> bytes, of devices that all list the same memory; None where they list nobody.

    A figure that no device can have is none.
    """
    lists = [device.processes for device in memory if device.processes is not None]
    if not lists:
        return None
    found: dict[int, int | None] = {}
    for each in lists:
        for pid, figure in each.items():
            known, told = found.get(pid), None if figure is None else _possible(figure)
            found[pid] = told if known is None else max(known, told or 0)
    return found


def owner(
    process: ProcessReading, known: Collection[str], mirror_uids: Mapping[str, str]
) -> str | None:
    """The uid of its pod: of one in another, that which the kubelet here knows, or the outer."""
    uids = [mirror_uids.get(uid, uid) for uid in process.pods]
    for uid in uids:
        if uid in known:
            return uid
    if not uids or is_static(uids[0]):
        return None
    return uids[0]


def _named(process: ProcessReading) -> str:
    if process.pods:  # or it would not be a stranger
        return f"{process.command} (static pod)"
    return process.command


def _netted(
    processes: Sequence[ProcessReading], figures: dict[int, int | None], used_bytes: int | None
) -> dict[int, int | None]:
    """The figures without what is counted to an MPS server a second time."""
    is_server = {p.pid for p in processes if p.command.startswith(_MPS_COMMAND)}
    servers = {pid: b for pid, b in figures.items() if b and pid in is_server}
    clients = [b for pid, b in figures.items() if pid not in servers]
    if not servers or not clients:
        return figures
    told_bytes = sum(b for b in clients if b is not None)
    if told_bytes == 0:
        return dict.fromkeys(figures)
    if used_bytes is None or None in clients:
        return figures
    twice_bytes = min(told_bytes, max(0, told_bytes + sum(servers.values()) - used_bytes))
    netted = dict(figures)
    for server, figure in servers.items():
        taken_bytes = min(figure, twice_bytes)
        netted[server] = figure - taken_bytes
        twice_bytes -= taken_bytes
    return netted


def _rows(
    first: DeviceReading,
    rows: Sequence[tuple[str, HoldingReading]],
    use: _Use | None,
    names: Mapping[str, tuple[str, str]],
) -> Iterable[PodUse]:
    left: dict[str, int | None] = {} if use is None else dict(use.pods)
    told: set[str] = set()
    for uuid, holding in rows:
        used_bytes: int | None = None
        source = holding.source
        if use is not None and holding.uid:
            # No process is no use; the pod's further rows have nothing left to tell.
            used_bytes = 0 if holding.uid in told else left.pop(holding.uid, 0)
            told.add(holding.uid)
            source = f"{source},proc,{first.source}"
        yield PodUse(
            uid=holding.uid,
            device=uuid,
            namespace=holding.namespace,
            name=holding.name,
            container=holding.container,
            replica=holding.replica,
            used_bytes=used_bytes,
            source=source,
        )
    for uid, used_bytes in left.items():
        namespace, name = names.get(uid, ("", ""))
        yield PodUse(
            uid=uid,
            device=first.uuid,
            namespace=namespace,
            name=name,
            used_bytes=used_bytes,
            source=f"proc,{first.source}",
        )


def _left(use: _Use, used_bytes: int | None) -> tuple[int | None, bool]:
    """What no pod uses (None: cannot be told), and whether processes list far too much."""
    owned = list(use.pods.values())
    if None in owned:
        return None, False
    owned_bytes = sum(figure for figure in owned if figure is not None)
    strangers = [figure for _, figure in use.strangers]
    unattributed_use_bytes = sum(figure for figure in strangers if figure is not None)
    if used_bytes is None:
        return (None if None in strangers else _possible(unattributed_use_bytes)), False
    too_much = owned_bytes + unattributed_use_bytes > used_bytes + TOLERANCE_BYTES
    return _possible(max(unattributed_use_bytes, used_bytes - owned_bytes, 0)), too_much


def _plus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else _possible(one + other)


def _possible(figure: int) -> int | None:
    """``figure``, or None where no device has that much: then it is a mistake of somebody's."""
    return figure if 0 <= figure <= MAX_DEVICE_BYTES else None
