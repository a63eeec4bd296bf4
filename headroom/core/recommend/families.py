"""Families of objects that are created again for each run, and the controller of a pod.

Both are derived only from names and labels, so the webhook can find a pod's profile without a
request to the API server.
"""

import re

from headroom.contract.kube import Pod
from headroom.contract.vramprofile import ProfileController

#: Suffixes that make names unique: dates or numbers, UUIDs, hashes, and the random text that the
#: API server appends to generateName.
_SUFFIX = re.compile(
    r"-(?:\d{4,}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?=[a-f]*\d)[0-9a-f]{8,}"
    r"|[bcdfghjklmnpqrstvwxz2456789]{5})$"
)
#: Labels with the hash that ends the name of a pod's ReplicaSet.
_HASH_LABELS = ("pod-template-hash", "rollouts-pod-template-hash")


def family(name: str, generate_name: str = "") -> str:
    """Return the prefix of the names of a family.

    If the object has a ``generate_name``, this is the prefix. Otherwise suffixes that make names
    unique are removed, as in ``train-20261125`` and ``train-x7k2p``.
    """
    if generate_name:
        return generate_name.rstrip("-.") or name
    while (shorter := _SUFFIX.sub("", name)) != name:
        name = shorter.rstrip("-.")
    return name


def profile_controller(pod: Pod, generate_name: str) -> ProfileController:
    """Return the kind of the pod's controller and the family of its name.

    All pods of one owner have the same value. A pod without a controller is its own owner.
    """
    controller = pod.metadata.controller
    if controller is None:
        return ProfileController(kind="Pod", name=family(pod.metadata.name, generate_name))
    labels = pod.metadata.labels or {}
    for label in _HASH_LABELS:
        if (suffix := labels.get(label)) and controller.name.endswith(f"-{suffix}"):
            name = controller.name.removesuffix(f"-{suffix}")
            return ProfileController(kind=controller.kind, name=name)
    return ProfileController(kind=controller.kind, name=family(controller.name))
