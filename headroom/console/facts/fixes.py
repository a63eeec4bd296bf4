"""Writes the commands and YAML that carry out suggestions, for people to copy."""

import json
from collections.abc import Mapping

from headroom.contract.annotations import VRAM
from headroom.contract.commands import command
from headroom.contract.kube import Pod
from headroom.core.cluster.idle_pods import owner_of

#: Controllers that create their pods again after a change of their template.
_ROLLED_OUT = frozenset({"Deployment", "StatefulSet", "DaemonSet"})
#: Maps each kind of controller to the field with its strategy for updates.
_STRATEGIES = {"Deployment": "strategy", "DaemonSet": "updateStrategy"}


def request_memory(pod: Pod, text: str) -> str:
    """Return a command that changes the annotation in the pod's controller, or YAML if the pod has
    no such controller.

    ``text`` is the value of ``headroom.gpu/vram``.
    """
    if owner_of(pod)[0] in _ROLLED_OUT:
        return _patch(pod, {"template": {"metadata": {"annotations": {VRAM: text}}}})
    return f"metadata:\n  annotations:\n    {VRAM}: {json.dumps(text)}"


def end_old_pods_first(pod: Pod) -> str:
    """Return the command that makes the pod's controller end an old pod before it starts a new one.

    Return "" if the kind of the controller is unknown or has no such setting.
    """
    field = _STRATEGIES.get(owner_of(pod)[0])
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    return _patch(pod, {field: rolling}) if field else ""


def end_all_old_pods_first(pod: Pod) -> str:
    """Return the command that makes the pod's Deployment end all its old pods before it starts new
    pods."""
    return _patch(pod, {"strategy": {"type": "Recreate", "rollingUpdate": None}})


def _patch(pod: Pod, spec: Mapping[str, object]) -> str:
    """Return the command that patches the spec of the pod's controller."""
    kind, owner = owner_of(pod)
    where = "-n", pod.metadata.namespace, "patch", kind.lower(), owner
    return command("kubectl", *where, "--type", "merge", "-p", json.dumps({"spec": spec}))


def tolerate(taint: str) -> str:
    """Return the YAML of a toleration for ``taint``, which has the form ``key=value:Effect`` or
    ``key:Effect``."""
    name, _, effect = taint.rpartition(":")
    key = name.partition("=")[0]
    toleration = f"{{key: {key}, operator: Exists, effect: {effect}}}"
    return f"spec:\n  tolerations:\n  - {toleration}"


def uncordon(node: str) -> str:
    return command("kubectl", "uncordon", node)
