"""Finds GPUs that are connected by NVLink, directly or through NVSwitches. Pure."""

from collections.abc import Iterable

from agent.probes.readings import FactsReading


def nvlink_groups(facts: Iterable[FactsReading]) -> dict[str, int]:
    """Return the number of each device's NVLink group, by UUID. Devices without NVLinks have none.

    Two GPUs are in one group if a path of NVLinks leads from one to the other. The groups are
    numbered from 0 in the order of the devices.
    """
    linked = [each for each in facts if each.nvlinks]
    #: Group of each PCI address, as the representative address of the group.
    parent: dict[str, str] = {}

    def root(address: str) -> str:
        while parent.setdefault(address, address) != address:
            address = parent[address]
        return address

    for each in linked:
        for remote in each.nvlinks:
            parent[root(remote)] = root(each.pci_bus_id.lower())
    numbers: dict[str, int] = {}
    return {
        each.uuid: numbers.setdefault(root(each.pci_bus_id.lower()), len(numbers))
        for each in linked
    }
