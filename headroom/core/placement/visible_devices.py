"""Determines from a pod's manifest whether the plugin or the pod decides which devices it sees.

The container toolkit reads ``NVIDIA_VISIBLE_DEVICES``, which the plugin sets. If the pod sets it
too, the pod's value takes precedence, except on nodes that ignore it
(``Plugin.ignores_visible_devices``). On the other nodes the pod itself chooses its devices.
Headroom cannot predict them, because the content of a ConfigMap is unknown and a UUID belongs to a
single node. The pod sees no device only if the value is ``none``, ``void`` or empty.

``envFrom`` adds all keys of a ConfigMap or Secret, which the manifest does not name, and Headroom
does not read Secrets. If Headroom assumed that each ``envFrom`` sets the variable, it would reject
many ordinary pods. So it makes this assumption only with ``Rules.suspect_env_from``, and only if
neither a prefix nor the pod's own ``env``, which takes precedence, excludes it. The agent detects
the remaining cases: if a process uses a device that its pod does not hold, its memory counts there.
"""

from collections.abc import Iterable
from enum import Enum

from headroom.contract.foreign_keys import VISIBLE_DEVICES
from headroom.contract.kube import Container
from headroom.core.placement.policy import Rules, VisibleDevices

#: Values of the variable with which a container sees no device.
NO_DEVICES = ("", "none", "void")


class Visible(Enum):
    """The source that decides which devices a pod sees, on nodes that honor the variable."""

    #: The device plugin decides, as usual.
    BY_PLUGIN = "by-plugin"
    #: The pod itself decides, so it gets a reservation on every device of a node that may honor it.
    BY_POD = "by-pod"
    #: The pod itself decides, so nodes that may honor it reject the pod.
    REJECTED = "rejected"


def visible(containers: Iterable[Container], rules: Rules) -> Visible:
    """Return the source that decides which devices a pod with these containers sees.

    ``containers`` includes init containers.
    """
    if not any(_chooses_itself(container, rules) for container in containers):
        return Visible.BY_PLUGIN
    reject = rules.visible_devices is VisibleDevices.REJECT
    return Visible.REJECTED if reject else Visible.BY_POD


def _chooses_itself(container: Container, rules: Rules) -> bool:
    """Return whether the container sets the variable to a value that may select devices."""
    named = [each for each in container.env or () if each.name == VISIBLE_DEVICES]
    if not named:
        return rules.suspect_env_from and any(
            VISIBLE_DEVICES.startswith(source.prefix) for source in container.env_from or ()
        )
    last = named[-1]  # the last entry wins
    return last.value_from is not None or (last.value or "") not in NO_DEVICES
