"""Assigns the driver's memory limits, which are per cgroup, to containers. Pure.

The kubelet names containers and cgroups number them. So a container's name is known only if its pod
has one container and one limit on the device.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from agent.probes.readings import DeviceReading, HoldingReading, LimitReading, MirrorReading
from agent.probes.replica_ids import resolve
from contract.gpunode import ContainerLimit


def grants(
    devices: Sequence[DeviceReading],
    holdings: Sequence[HoldingReading],
    mirrors: Iterable[MirrorReading],
    readings: Sequence[LimitReading],
) -> list[ContainerLimit]:
    """Return the limits that were read, with pod and container names from the kubelet."""
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
        place = (reading.uid, reading.device)
        named = containers.get(place, set())
        namespace, name = names.get(reading.uid, ("", ""))
        found.append(
            ContainerLimit(
                uid=mirror_uids.get(reading.uid, reading.uid),
                device=reading.device,
                container_id=reading.container_id,
                container=min(named) if len(named) == limits[place] == 1 else "",
                namespace=namespace,
                name=name,
                used_bytes=reading.used_bytes,
                soft_bytes=reading.soft_bytes,
                hard_bytes=reading.hard_bytes,
            )
        )
    return found
