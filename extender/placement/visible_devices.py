"""Determines from a pod's manifest what decides which devices its containers see.

The container toolkit reads ``NVIDIA_VISIBLE_DEVICES``. The plugin sets it. If the pod sets it too,
the pod's value wins, on nodes that use the variable at all (``Plugin.pinning``). With the downward
API, the variable can follow the placement::

    env:
    - name: NVIDIA_VISIBLE_DEVICES
      valueFrom:
        fieldRef:
          fieldPath: metadata.annotations['headroom.gpu/devices.0']

Headroom writes the annotation with the Binding, before the kubelet sees the pod. With any other
value the pod itself chooses its devices, and Headroom cannot predict them: the content of a
ConfigMap is unknown, and a uuid belongs to one node. Only with ``none``, ``void`` and the empty
value the pod sees no device.

``envFrom`` adds all keys of a ConfigMap or Secret, and the manifest does not name them. Headroom
does not read Secrets. If Headroom assumed that each ``envFrom`` sets the variable, it would reject
many ordinary pods. So it does that only with ``Rules.suspect_env_from``, and not if a prefix or the
pod's own ``env``, which wins, excludes it. The agent detects the remaining cases: if a process uses
a device that its pod does not hold, its memory counts there.
"""

import re
from collections.abc import Collection, Sequence
from enum import Enum

from contract.annotations import DEVICES
from contract.kube import Container, EnvVar
from extender.placement.policy import Rules, VisibleDevices

VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
#: Values of the variable with which a container sees no device.
NO_DEVICES = ("", "none", "void")
_PLACEMENT_FIELD = re.compile(rf"metadata\.annotations\['{re.escape(DEVICES)}(\d+)'\]")


class Visible(Enum):
    """The source that decides which devices a pod sees, on nodes that obey the variable."""

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
    """Return what decides which devices a pod with these containers sees.

    ``containers`` include init containers. ``asking`` are the names of the GPU containers.
    ``placed`` are the indices of the GPU containers for which Headroom writes an annotation. If
    only some GPU containers follow the placement, the others could get a device without a
    reservation. Then the pod counts as choosing its devices itself.
    """
    if not any(
        _variable(each) or (rules.suspect_env_from and each.env_from) for each in containers
    ):
        return Visible.BY_PLUGIN  # nearly all pods
    chooses = any(_chooses_itself(container, rules) for container in containers)
    follows = {container.name for container in containers if _followed_index(container) is not None}
    partly = not follows.issuperset(asking) or not followed(containers) <= set(placed)
    if chooses or (follows and partly):
        reject = rules.visible_devices is VisibleDevices.REJECT
        return Visible.REJECTED if reject else Visible.BY_POD
    return Visible.BY_PLACEMENT if follows else Visible.BY_PLUGIN


def followed(containers: Sequence[Container]) -> set[int]:
    """Return the indices of the containers whose placement these containers follow."""
    found = (_followed_index(container) for container in containers)
    return {index for index in found if index is not None}


def _variable(container: Container) -> EnvVar | None:
    """Return the variable from the container's ``env``; the last entry wins."""
    named = [each for each in container.env or () if each.name == VISIBLE_DEVICES]
    return named[-1] if named else None


def _followed_index(container: Container) -> int | None:
    """Return the index of the container whose placement this one follows; None if it does not."""
    variable = _variable(container)
    source = variable and variable.value_from
    field = source.field_ref if source else None
    match = _PLACEMENT_FIELD.fullmatch(field.field_path) if field else None
    return int(match[1]) if match else None


def _chooses_itself(container: Container, rules: Rules) -> bool:
    """Return whether the container's value of the variable may name devices of its own choice."""
    variable = _variable(container)
    if variable is None:
        return rules.suspect_env_from and any(
            VISIBLE_DEVICES.startswith(source.prefix) for source in container.env_from or ()
        )
    if variable.value_from is not None:
        return _followed_index(container) is None
    return (variable.value or "") not in NO_DEVICES
