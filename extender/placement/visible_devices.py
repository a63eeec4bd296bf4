"""Finds out from a pod's manifest what decides which devices its containers see.

The container toolkit reads ``NVIDIA_VISIBLE_DEVICES``. The plugin sets it. If the pod sets it too,
the pod's value wins, on nodes that use the variable at all (``Plugin.pinning``). A pod can make it
follow the placement by the downward API::

    env:
    - name: NVIDIA_VISIBLE_DEVICES
      valueFrom:
        fieldRef:
          fieldPath: metadata.annotations['headroom.gpu/devices.0']

Headroom writes the annotation with the Binding, before the kubelet sees the pod. With any other
value the pod chooses its devices: the content of a ConfigMap is unknown, and a uuid belongs to a
node that is not chosen yet. Only ``none``, ``void`` and the empty value show no device.

``envFrom`` adds all keys of a ConfigMap or Secret, and the manifest does not name them. Headroom
does not read Secrets. To suspect every ``envFrom`` would reject all pods with settings in one. So
Headroom suspects it only if its settings request that, and never if a prefix or the pod's own
``env``, which wins, excludes it. The agent finds what remains: if a process uses a device that its
pod does not hold, its memory counts there.
"""

import re
from collections.abc import Collection, Sequence
from enum import Enum

from contract.annotations import DEVICES
from contract.kube import Container, EnvVar
from extender.placement.policy import Rules, VisibleDevices

VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
#: Values of the variable that show no device.
NO_DEVICES = ("", "none", "void")
_FOLLOWS = re.compile(rf"metadata\.annotations\['{re.escape(DEVICES)}(\d+)'\]")


class Visible(Enum):
    """The source of a pod's visible devices, on nodes that obey NVIDIA_VISIBLE_DEVICES."""

    #: The device plugin, as usual.
    BY_PLUGIN = "by-plugin"
    #: The placement: on a pinned node the pod gets the device that Headroom chooses.
    BY_PLACEMENT = "by-placement"
    #: The pod itself. It gets a reservation on every device of a node that may obey it.
    BY_POD = "by-pod"
    #: The pod itself. Nodes that may obey it reject the pod.
    REJECTED = "rejected"


def visible(
    containers: Sequence[Container], asking: Collection[str], placed: Collection[int], rules: Rules
) -> Visible:
    """Return what decides for a pod with these containers, including init containers.

    ``asking`` are the names of GPU containers. ``placed`` are the indices of those whose devices an
    annotation records. Either all GPU containers follow the placement or none: another one would
    get a device without a reservation.
    """
    if not any(_set(each) or (rules.suspect_env_from and each.env_from) for each in containers):
        return Visible.BY_PLUGIN  # nearly all pods
    chooses = any(_chooses(container, rules) for container in containers)
    follows = {container.name for container in containers if _followed(container) is not None}
    partly = not follows.issuperset(asking) or not followed(containers) <= set(placed)
    if chooses or (follows and partly):
        reject = rules.visible_devices is VisibleDevices.REJECT
        return Visible.REJECTED if reject else Visible.BY_POD
    return Visible.BY_PLACEMENT if follows else Visible.BY_PLUGIN


def followed(containers: Sequence[Container]) -> set[int]:
    """Return the indices of the containers whose placement any of these containers follows."""
    found = (_followed(container) for container in containers)
    return {index for index in found if index is not None}


def _set(container: Container) -> EnvVar | None:
    """Return the variable as the container sets it; the last one wins."""
    named = [each for each in container.env or () if each.name == VISIBLE_DEVICES]
    return named[-1] if named else None


def _followed(container: Container) -> int | None:
    variable = _set(container)
    source = variable and variable.value_from
    field = source.field_ref if source else None
    match = _FOLLOWS.fullmatch(field.field_path) if field else None
    return int(match[1]) if match else None


def _chooses(container: Container, rules: Rules) -> bool:
    variable = _set(container)
    if variable is None:
        return rules.suspect_env_from and any(
            VISIBLE_DEVICES.startswith(source.prefix) for source in container.env_from or ()
        )
    if variable.value_from is not None:
        return _followed(container) is None
    return (variable.value or "") not in NO_DEVICES
