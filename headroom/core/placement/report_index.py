"""Indexes a node's report by devices that share a memory, and by pods that hold their replicas."""

from collections.abc import Container, Mapping, Sequence, Set

from headroom.contract.gpunode import Charge, Device, GPUNodeStatus, PodUse, Reservation

#: Indices into ``GPUNodeStatus.pods``. Each of its items is called a row of the report.
Rows = tuple[int, ...]
#: Ascending indices (*slots*) of the reported devices that share one memory. Usually it is a single
#: index.
Memory = tuple[int, ...]


def memories_of(devices: Sequence[Device]) -> list[Memory]:
    """Return the memory of each slot. Compute instances of one GPU instance share their memory."""
    slots_of: dict[tuple[str, int] | int, list[int]] = {}
    keys: list[tuple[str, int] | int] = []
    for slot, device in enumerate(devices):
        shares = device.kind == "mig" and device.parent and device.gpu_instance is not None
        keys.append((device.parent or "", device.gpu_instance or 0) if shares else slot)
        slots_of.setdefault(keys[-1], []).append(slot)
    return [tuple(slots_of[key]) for key in keys]


class ReportIndex:
    """The rows of the report's pods, by pod and by device.

    Several rows of one replica count only once, because an app container reuses the replica of an
    earlier init container and the kubelet lists both containers. Pods in ``by_environment`` may use
    a device without holding a replica of it, so their rows without a replica do not count as a
    replica.
    """

    def __init__(self, status: GPUNodeStatus, by_environment: Container[str]) -> None:
        self._pods = status.pods
        slot_of = {device.uuid: slot for slot, device in enumerate(status.devices)}
        self._resources = [device.resource for device in status.devices]
        #: Replicas by uid and slot.
        self._replicas: dict[str, dict[int, set[str]]] = {}
        #: Rows by slot and uid.
        self._rows: list[dict[str, list[int]]] = [{} for _ in status.devices]
        for index, row in enumerate(status.pods):
            slot = slot_of.get(row.device)
            if slot is None:
                continue
            replicas = self._replicas.setdefault(row.uid, {}).setdefault(slot, set())
            if row.replica or row.uid not in by_environment:
                replicas.add(row.replica)
            self._rows[slot].setdefault(row.uid, []).append(index)

    def uids(self, slot: int) -> Set[str]:
        """Return the uids of the pods that the report shows on the device."""
        return self._rows[slot].keys()

    def replicas_of(self, slot: int, uids: Set[str] | None = None) -> int:
        """Return how many replicas of the device these pods hold. Without ``uids``, all pods
        count."""
        shown = self._rows[slot]
        return sum([len(self._replicas[uid][slot]) for uid in shown if uids is None or uid in uids])

    def missing(self, uid: str, charge: Charge) -> int:
        """Return how many replicas of the charge the pod does not hold yet."""
        held = 0
        for slot, replicas in self._replicas.get(uid, {}).items():
            if self._resources[slot] == charge.resource:
                held += len(replicas)
        return max(0, charge.count - held)

    def of(self, uid: str, memory: Memory) -> Rows:
        """Return the rows of one pod in a memory."""
        return tuple([row for slot in memory for row in self._rows[slot].get(uid, ())])

    def rows_of(self, uid: str) -> list[PodUse]:
        """Return all rows of one pod on the reported devices."""
        slots = self._replicas.get(uid, {})
        return [self._pods[row] for slot in slots for row in self._rows[slot][uid]]

    def uses_nothing(self, rows: Rows) -> bool:
        """Return whether all these rows have a measured use of 0."""
        return all(self._pods[row].used_bytes == 0 for row in rows)

    def rows(self, memory: Memory) -> Rows:
        """Return the rows of all pods in a memory."""
        return tuple(
            [row for slot in memory for of_pod in self._rows[slot].values() for row in of_pod]
        )

    def unreserved_pods(
        self, memory: Memory, reservations: Mapping[str, Reservation]
    ) -> tuple[Rows, ...]:
        """Return the rows of each pod in a memory that has no reservation."""
        uids = dict.fromkeys(uid for slot in memory for uid in self._rows[slot])
        return tuple([self.of(uid, memory) for uid in uids if uid not in reservations])
