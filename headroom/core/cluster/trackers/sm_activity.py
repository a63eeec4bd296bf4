"""Chooses the SM activity of each device: its history while that is fresh, and otherwise the
agent's sample.

The caller of ``replace`` always passes the whole fresh history, so a missing entry has become
stale. As in DCGM, the key is the GPU, or the GPU and the GPU instance for a MIG device. New history
updates only the devices whose activity has changed, and their memory is not computed again.
"""

from collections.abc import Mapping

import msgspec

from headroom.contract.dcgm import Key
from headroom.contract.gpunode import Device
from headroom.contract.timestamps import age
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.device_reading import HISTORY, Activity, reported
from headroom.core.placement.snapshot import NodeTerms
from headroom.core.tracker import Tracker, WeighedNode


def key_of(device: Device) -> Key:
    if device.kind == "mig" and device.parent and device.gpu_instance is not None:
        return device.parent, device.gpu_instance
    return device.uuid, None


class Activities(Tracker):
    """The SM activity of all devices. Any thread may call ``node_of`` and ``age_s``."""

    def __init__(self) -> None:
        self._history: Mapping[Key, Activity] = {}
        #: The node of each GPU, by the GPU's UUID.
        self._node_of: dict[str, str] = {}
        #: The UUIDs of the GPUs of each node.
        self._gpus_of: dict[str, tuple[str, ...]] = {}

    def replace(self, history: Mapping[Key, Activity]) -> None:
        """Replace the history. The caller must not change the mapping afterwards."""
        self._history = history

    def node_of(self, key: Key) -> str | None:
        return self._node_of.get(key[0])

    def node_weighed(self, node: WeighedNode) -> None:
        name, gpus = node.name, tuple([key_of(terms.device)[0] for terms in node.devices])
        had = self._gpus_of.get(name, ())
        if gpus == had:
            return
        for gpu in set(had).difference(gpus):
            if self._node_of.get(gpu) == name:
                del self._node_of[gpu]
        self._node_of.update(dict.fromkeys(gpus, name))
        if gpus:
            self._gpus_of[name] = gpus
        else:
            del self._gpus_of[name]

    def applied(self, devices: tuple[DeviceTerms, ...]) -> tuple[DeviceTerms, ...]:
        """Return devices computed from the agent's report, with history instead of its sample."""
        if not self._history:
            return devices
        return tuple(self._counted(terms, terms.activity) for terms in devices)

    def moved(self, node: NodeTerms, sampled_at: str) -> NodeTerms:
        """Return the node with the current history instead of the history with which it was
        computed.

        Devices without history get the agent's sample. ``sampled_at`` is the time of its report.
        """
        devices = (self._counted(t, reported(t.device, sampled_at)) for t in node.devices)
        return msgspec.structs.replace(node, devices=tuple(devices))

    def _counted(self, terms: DeviceTerms, sampled: Activity | None) -> DeviceTerms:
        counts = self._history.get(key_of(terms.device), sampled)
        return (
            terms if counts == terms.activity else msgspec.structs.replace(terms, activity=counts)
        )

    def age_s(self, terms: DeviceTerms, now_s: float, wall_s: float) -> float | None:
        """Return the age of the newest sample in the device's activity, or None if unknown.

        The newest sample is looked up, because history that has hardly changed is not applied
        again.
        """
        counts = terms.activity
        if counts is None:
            return None
        if counts.source != HISTORY:
            return age(counts.sampled_at, wall_s)
        newest = self._history.get(key_of(terms.device), counts)
        return max(0.0, now_s - newest.sampled_at_s)


def sm_decreased(before: NodeTerms, after: NodeTerms) -> bool:
    """Return whether the SM activity of any device has decreased or has become known."""
    known = [terms for terms in after.devices if terms.activity is not None]
    if not known:
        return False
    was = {terms.device.uuid: terms.activity for terms in before.devices}
    return any(
        (had := was.get(terms.device.uuid)) is None
        or (terms.activity is not None and terms.activity.ratio < had.ratio)
        for terms in known
    )
