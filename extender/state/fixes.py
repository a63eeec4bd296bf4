"""Commands and YAML that carry out suggestions, for people to copy."""

import json
import shlex

from contract.annotations import VRAM
from contract.kube import Pod
from extender.state.idle_pods import owner_of

#: Controllers that create their pods again after a change of their template.
_ROLLED_OUT = frozenset({"Deployment", "StatefulSet", "DaemonSet"})


def request_memory(pod: Pod, text: str) -> str:
    """Return how to change the pod's annotation: a command for its controller, otherwise YAML.

    ``text``: the value of ``headroom.gpu/vram``.
    """
    kind, owner = owner_of(pod)
    if kind in _ROLLED_OUT:
        patch = json.dumps({"spec": {"template": {"metadata": {"annotations": {VRAM: text}}}}})
        where = f"-n {pod.metadata.namespace} patch {kind.lower()} {owner}"
        return f"kubectl {where} --type merge -p {shlex.quote(patch)}"
    return f"metadata:\n  annotations:\n    {VRAM}: {json.dumps(text)}"


def tolerate(taint: str) -> str:
    """Return the YAML of a toleration; ``taint``: as ``key=value:Effect`` or ``key:Effect``."""
    name, _, effect = taint.rpartition(":")
    key = name.partition("=")[0]
    toleration = f"{{key: {key}, operator: Exists, effect: {effect}}}"
    return f"spec:\n  tolerations:\n  - {toleration}"


def uncordon(node: str) -> str:
    return f"kubectl uncordon {node}"
