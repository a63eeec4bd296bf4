"""Finds the pods that use more memory than the ledger of the node has reserved for them. Pure.

Extenders decide whether to evict these pods (``core.overuse.selection``). The agent only
reports their devices sooner (see ``agent.status_writer``).
"""

from collections import defaultdict

from agent.attribution import memories
from agent.gate_decision import asked, reserved_for, rows_in
from agent.status_writer import NO_OVERUSE, Overuse
from headroom.contract.gpunode import GPUNodeSpec, GPUNodeStatus, PodUse


def overuse(status: GPUNodeStatus, ledger: GPUNodeSpec) -> Overuse:
    """Return the overuse in a sample. Pods without a reservation cannot overuse."""
    reservations = ledger.reservations
    if not reservations:
        return NO_OVERUSE
    rows_of: dict[str, list[PodUse]] = defaultdict(list)
    for row in status.pods:
        rows_of[reserved_for(row, ledger)].append(row)
    devices: set[str] = set()
    for memory in memories(status.devices):
        used_bytes: dict[str, int] = defaultdict(int)
        for row in rows_in(memory, status):
            used_bytes[reserved_for(row, ledger)] += row.used_bytes or 0
        if any(
            used > asked(reservations[uid], memory, uses=True, rows=rows_of[uid])
            for uid, used in used_bytes.items()
            if uid in reservations
        ):
            devices.update(device.uuid for device in memory)
    decisions = (each.overuse for each in reservations.values() if each.overuse)
    return Overuse(frozenset(devices), any(not each.rejected_at for each in decisions))
