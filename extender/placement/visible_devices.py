"""Who says which devices a container sees, as far as its manifest tells.

The container toolkit reads ``NVIDIA_VISIBLE_DEVICES``. The plugin sets it, and what the pod sets
itself comes later and counts, where it is looked at at all (``Plugin.pinning``). A pod can let it
follow our placement, by the downward API::

    env:
    - name: NVIDIA_VISIBLE_DEVICES
      valueFrom:
        fieldRef:
          fieldPath: metadata.annotations['headroom.gpu/devices.0']

The annotation is written with the Binding, before the kubelet can see the pod. Any other value is
the pod's own choice, whatever it says: of a ConfigMap we do not know the content, and a uuid is one
of a node that we have not chosen yet. Only ``none``, ``void`` and the empty value show no device.

``envFrom`` brings in a whole ConfigMap or Secret and does not even name the variables. To read
Secrets is no business of ours, and to suspect each would refuse every pod that takes its settings
from one. So it is suspected only where the settings say so, and never where a prefix or the pod's
own ``env``, which counts more, excludes it. What comes in that way unsuspected is found by the
agent: a process on a device that its pod does not hold is charged there.
"""

import re
from collections.abc import Collection, Sequence
from enum import Enum

from contract.annotations import DEVICES
from contract.kube import Container, EnvVar
from extender.placement.policy import Rules, VisibleDevices

VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
#: Its values that show none at all.
NO_DEVICES = ("", "none", "void")
_FOLLOWS = re.compile(rf"metadata\.annotations\['{re.escape(DEVICES)}(\d+)'\]")


class Visible(Enum):
    #: The plugin, as always.
    BY_PLUGIN = "by-plugin"
    #: Our placement: on a node that is pinned the pod gets the device that we choose.
    BY_PLACEMENT = "by-placement"
    #: The pod itself, and it is charged on every device of a node that may obey it.
    BY_POD = "by-pod"
    #: The pod itself, and it is refused there.
    REJECTED = "rejected"


def visible(
    containers: Sequence[Container], asking: Collection[str], placed: Collection[int], rules: Rules
) -> Visible:
    """Who decides for a pod with these containers, init containers included.

    ``asking`` names those that ask for GPUs, ``placed`` are the indices of those whose placement is
    written down. A placement is followed by all that ask or by none: one that does not would be
    given a device that is not charged to the pod.
    """
    if not any(_set(each) or (rules.suspect_env_from and each.env_from) for each in containers):
        return Visible.BY_PLUGIN  # so with nearly every pod
    chooses = any(_chooses(container, rules) for container in containers)
    follows = {container.name for container in containers if _followed(container) is not None}
    partly = not follows.issuperset(asking) or not followed(containers) <= set(placed)
    if chooses or (follows and partly):
        reject = rules.visible_devices is VisibleDevices.REJECT
        return Visible.REJECTED if reject else Visible.BY_POD
    return Visible.BY_PLACEMENT if follows else Visible.BY_PLUGIN


def followed(containers: Sequence[Container]) -> set[int]:
    """The containers, by their index in the pod, whose placement is followed by any of these."""
    found = (_followed(container) for container in containers)
    return {index for index in found if index is not None}


def _set(container: Container) -> EnvVar | None:
    """The variable as the container sets it; of two by one name the last counts."""
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
