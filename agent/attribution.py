"""Attributes the memory of each device to pods. Pure.

A *memory* belongs to a device, or to a MIG GPU instance whose compute instances share it. For each
memory:

    used = use by processes of pods + unattributed use

Unattributed use is the use by processes outside of pods plus the memory that no listed process
uses. The values are read at slightly different times, so they may not add up. If the use by pods is
too large, unattributed use is the use by processes outside of pods alone. If the processes together
use 64 MiB more than the device reports as used, the source is degraded.

If processes cannot be read, if the driver lists no processes, or if it does not report the bytes of
a pod's process, nothing is attributed and unattributed use is absent.

With MPS, some drivers count the clients' memory a second time for the server, so the processes seem
to use more memory than the device. The excess is subtracted from the server's use, but at most the
clients' total. If the driver lists no memory for the clients on a device that the plugin shares by
MPS, the server's value belongs to the clients in unknown proportions, so all values are absent.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from agent.probes.cgroup import is_static
from agent.probes.readings import (
    ActivityReading,
    Degraded,
    DeviceReading,
    HoldingReading,
    LimitReading,
    MirrorReading,
    ProcessReading,
    Reading,
)
from agent.probes.replica_ids import resolve
from agent.report_rows import MemoryUse, Row, rows_of
from headroom.contract.gpunode import ContainerLimit, Device, PodUse, UnattributedProcess
from headroom.contract.quantity import MAX_DEVICE_BYTES

_Device = TypeVar("_Device", Device, DeviceReading)

#: Differences of at most this many bytes are not reported, because the values are read at different
#: times.
TOLERANCE_BYTES = 64 << 20

#: Command of the MPS server and of its control daemon. The kernel keeps only 15 characters of it.
_MPS_COMMAND = "nvidia-cuda-mps"


@dataclass(frozen=True, slots=True)
class Attributed:
    """The users of the node's devices, and how much memory each of them uses."""

    rows: list[Row]
    #: Unattributed bytes of each device by UUID, or None if they cannot be computed.
    unattributed: Mapping[str, int | None]
    #: Processes that belong to no pod.
    outside_pods: list[UnattributedProcess]
    complaints: list[Degraded]
    #: UUID of the first device of each memory whose processes could be read.
    read: set[str]

    @property
    def pods(self) -> list[PodUse]:
        return [row.use for row in self.rows]


def attribute(
    devices: Sequence[DeviceReading],
    used: Mapping[str, int],
    holdings: Iterable[HoldingReading],
    processes: Mapping[int, ProcessReading] | None,
    mirrors: Iterable[MirrorReading] = (),
    by_mps: Collection[str] = (),
) -> Attributed:
    """Attribute the memory of each device.

    ``used`` maps the UUID of each device whose use is known to its used bytes. ``processes`` maps
    each pid to its reading, and is None if processes could not be read. ``by_mps`` contains the
    devices that the plugin shares by MPS.
    """
    mirror_uids = {mirror.hash: mirror.uid for mirror in mirrors}
    held = list(_held(devices, holdings, mirror_uids))
    on: dict[str, list[HoldingReading]] = {}
    for uuid, holding in held:
        on.setdefault(uuid, []).append(holding)
    names = {holding.uid: (holding.namespace, holding.name) for _, holding in held if holding.name}
    found: list[Row] = []
    read: set[str] = set()
    unattributed: dict[str, int | None] = {}
    outside_pods: list[UnattributedProcess] = []
    complaints: list[Degraded] = []
    for memory in memories(devices):
        uuids = [device.uuid for device in memory]
        used_bytes = max((used[uuid] for uuid in uuids if uuid in used), default=None)
        rows = [
            (uuid, holding)
            for uuid in uuids
            for holding in sorted(on.get(uuid, ()), key=lambda h: (h.container, h.replica))
        ]
        is_by_mps = any(uuid in by_mps for uuid in uuids)
        use = _use(memory, used_bytes, processes, mirror_uids, is_by_mps)
        found += rows_of(memory[0], rows, use, names)
        unattributed |= dict.fromkeys(uuids, None)
        if use is None:
            continue
        read.add(uuids[0])
        outside_pods += [
            UnattributedProcess(uuids[0], process.pid, _display_name(process), process_bytes)
            for process, process_bytes in use.outside_pods
        ]
        unattributed_bytes, is_excessive = _unattributed(use, used_bytes)
        if unattributed_bytes is not None:
            # If several devices share one memory, its use is reported on the first device.
            unattributed |= {**dict.fromkeys(uuids, 0), uuids[0]: unattributed_bytes}
        if is_excessive:
            complaints.append(
                Degraded(
                    memory[0].source, "processes use more memory than the driver reports as used"
                )
            )
    outside_pods.sort(key=lambda row: -(row.used_bytes or 0))
    found.sort(key=lambda row: (row.use.uid, row.use.namespace, row.use.name))
    return Attributed(found, unattributed, outside_pods, complaints, read)


def memories(devices: Iterable[_Device]) -> list[list[_Device]]:
    """Return the devices grouped by memory. The MIG devices of one GPU instance form one group.

    Groups and devices keep their order. If several devices have the same UUID, the last one is
    used.
    """
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
    """Yield (device UUID, holding) for each device of the node that a container holds. The holding
    has the pod's uid at the API server."""
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
    mirror_uids: Mapping[str, str],
    is_by_mps: bool,
) -> MemoryUse | None:
    """Return the use of one memory by each pod, and by each process outside of pods.

    Return None if the driver lists no processes, or if the pod of a listed process is unknown.
    """
    listed = _listed(memory)
    if processes is None or listed is None:
        return None
    members: list[ProcessReading] = []
    for pid in listed:
        process = processes.get(pid)
        if process is None or not process.known:
            return None
        members.append(process)
    figures = _without_mps_duplicates(members, listed, used_bytes, is_by_mps)
    use = MemoryUse()
    for process in members:
        figure = figures[process.pid]
        uid = owner(process, mirror_uids)
        if uid is None:
            use.outside_pods.append((process, figure))
        else:
            use.pods[uid] = _sum(use.pods.get(uid, 0), figure)
            container = process.container
            runs = use.runs.setdefault(uid, {})
            run = runs.get(container.id, (container, 0))
            runs[container.id] = run[0], _sum(run[1], figure)
    return use


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else _possible(one + other)


def _listed(memory: Sequence[DeviceReading]) -> dict[int, int | None] | None:
    """Return the bytes of each pid on a memory, or None if no device of the memory lists processes.

    If several devices list a pid, the largest value is used. Impossible values become None.
    """
    lists = [device.processes for device in memory if device.processes is not None]
    if not lists:
        return None
    found: dict[int, int | None] = {}
    for each in lists:
        for pid, figure in each.items():
            known, used_bytes = found.get(pid), None if figure is None else _possible(figure)
            found[pid] = used_bytes if known is None else max(known, used_bytes or 0)
    return found


def owner(process: ProcessReading, mirror_uids: Mapping[str, str]) -> str | None:
    """Return the API uid of a process's pod, or None if the process is in no pod.

    Also return None for a static pod whose API uid is not known.
    """
    uid = mirror_uids.get(process.pod, process.pod)
    return None if not uid or is_static(uid) else uid


def _display_name(process: ProcessReading) -> str:
    """Return the name to report for a process that has no owner."""
    if process.pod:  # This is a static pod whose API uid is not known.
        return f"{process.command} (static pod)"
    return process.command


def _without_mps_duplicates(
    processes: Sequence[ProcessReading],
    figures: dict[int, int | None],
    used_bytes: int | None,
    is_by_mps: bool,
) -> dict[int, int | None]:
    """Return the bytes of each pid without the memory that the driver counts twice with MPS.

    The excess is subtracted from the server's bytes. If the driver lists no memory for the clients,
    all values are None, but only on devices that the plugin shares by MPS. On other devices, any
    process could call itself an MPS server and thereby hide the use of all pods.
    """
    is_server = {p.pid for p in processes if p.command.startswith(_MPS_COMMAND)}
    servers = {pid: b for pid, b in figures.items() if b and pid in is_server}
    clients = [b for pid, b in figures.items() if pid not in servers]
    if not servers or not clients:
        return figures
    client_bytes = sum(b for b in clients if b is not None)
    if client_bytes == 0:
        return dict.fromkeys(figures) if is_by_mps else figures
    if used_bytes is None or None in clients:
        return figures
    surplus_bytes = min(client_bytes, max(0, client_bytes + sum(servers.values()) - used_bytes))
    corrected = dict(figures)
    for server, figure in servers.items():
        subtracted_bytes = min(figure, surplus_bytes)
        corrected[server] = figure - subtracted_bytes
        surplus_bytes -= subtracted_bytes
    return corrected


def _unattributed(use: MemoryUse, used_bytes: int | None) -> tuple[int | None, bool]:
    """Return the unattributed bytes of one memory, and whether its processes exceed the used
    memory.

    ``used_bytes`` is the use that the device reports. The returned bytes are None if they are
    unknown.
    """
    of_pods = list(use.pods.values())
    if None in of_pods:
        return None, False
    pods_bytes = sum(figure for figure in of_pods if figure is not None)
    outside_pods = [figure for _, figure in use.outside_pods]
    outside_bytes = sum(figure for figure in outside_pods if figure is not None)
    if used_bytes is None:
        return (None if None in outside_pods else _possible(outside_bytes)), False
    is_excessive = pods_bytes + outside_bytes > used_bytes + TOLERANCE_BYTES
    return _possible(max(outside_bytes, used_bytes - pods_bytes, 0)), is_excessive


def _possible(figure: int) -> int | None:
    """Return ``figure``, or None if it is negative or more bytes than any device has."""
    return figure if 0 <= figure <= MAX_DEVICE_BYTES else None


def pod_sm(readings: Iterable[Reading]) -> dict[tuple[str, str], float]:
    """Return the share of the device's SM time, 0..1, for each (pod uid, device).

    The driver samples only active processes, so a pod without a value was idle. The shares are only
    exported as metrics, because no placement depends on them.
    """
    readings = list(readings)
    processes = {r.pid: r for r in readings if isinstance(r, ProcessReading)}
    mirrors = {r.hash: r.uid for r in readings if isinstance(r, MirrorReading)}
    found: dict[tuple[str, str], float] = {}
    for reading in readings:
        if not isinstance(reading, ActivityReading):
            continue
        for pid, ratio in reading.sm_by_pid.items():
            process = processes.get(pid)
            uid = None if process is None else owner(process, mirrors)
            if uid is not None:
                key = (uid, reading.uuid)
                found[key] = min(1.0, found.get(key, 0.0) + ratio)
    return found


def container_limits(
    devices: Sequence[DeviceReading],
    holdings: Sequence[HoldingReading],
    mirrors: Iterable[MirrorReading],
    readings: Sequence[LimitReading],
) -> list[ContainerLimit]:
    """Return the driver's limits of cgroups, with pod and container names from the kubelet.

    A container's name is known only if its pod has one container and one limit on the device.
    """
    mirror_uids = {mirror.hash: mirror.uid for mirror in mirrors}
    device_of = resolve({holding.replica for holding in holdings}, devices)
    names = {h.uid: (h.namespace, h.name) for h in holdings if h.name}
    containers: dict[tuple[str, str], set[str]] = {}
    for holding in holdings:
        if device := device_of.get(holding.replica):
            containers.setdefault((holding.uid, device), set()).add(holding.container)
    limits = Counter((reading.uid, reading.device) for reading in readings)
    found: list[ContainerLimit] = []
    for reading in readings:
        pod_device = (reading.uid, reading.device)
        container_names = containers.get(pod_device, set())
        is_unique = len(container_names) == limits[pod_device] == 1
        namespace, name = names.get(reading.uid, ("", ""))
        found.append(
            ContainerLimit(
                uid=mirror_uids.get(reading.uid, reading.uid),
                device=reading.device,
                container_id=reading.container_id,
                container=min(container_names) if is_unique else "",
                namespace=namespace,
                name=name,
                used_bytes=reading.used_bytes,
                soft_bytes=reading.soft_bytes,
                hard_bytes=reading.hard_bytes,
            )
        )
    return found
