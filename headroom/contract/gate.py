"""The gate: an init container that succeeds only if the pod's device has enough free memory.

The agent of the node decides that. The gate is the first init container, so that no other container
of the pod runs while it waits. It requests no GPU: the kubelet would reuse the init container's
devices for the later containers, and would not request theirs from the device plugin.

A pod's author could write a container of this name that succeeds at once. Two rules exclude that
(docs/design/adr/0060). The webhook replaces every container of this name when a GPU pod is created.
And a container counts as the gate only if every field equals the webhook's, except for what the API
server and the admission plugins that ``is_whole`` lists may change.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from headroom.contract.annotations import parse_gated
from headroom.contract.errors import BadAnnotation
from headroom.contract.keys import GATED
from headroom.contract.kube import Container, InitContainer, Pod

#: Name of the container.
GATE = "headroom-gate"
#: Port of the agent that the gate asks.
PORT = 9410

#: Limits and requests of the gate, if nothing requires more.
GATE_RESOURCES: Mapping[str, str] = {"cpu": "100m", "memory": "32Mi"}
#: Mounts that other admission plugins add to every container: tokens of the ServiceAccount and of
#: a cloud's workload identity. Whole paths, because the API server stores paths with "..".
_TOKEN_MOUNTS = frozenset(
    (
        "/var/run/secrets/kubernetes.io/serviceaccount",
        "/var/run/secrets/eks.amazonaws.com/serviceaccount",
        "/var/run/secrets/pods.eks.amazonaws.com/serviceaccount",
        "/var/run/secrets/azure/tokens",
    )
)
#: Prefixes of variables that these plugins add. The gate does not read them.
_CLOUD_VARIABLES = ("AWS_", "AZURE_")
#: Field -> values that the API server or the admission plugin AlwaysPullImages may write.
_DEFAULTS: Mapping[str, tuple[object, ...]] = {
    "image_pull_policy": ("IfNotPresent", "Always"),
    # The kubelet mounts an empty file at this path, so another one could hide the gate's program.
    "termination_message_path": ("/dev/termination-log",),
    "termination_message_policy": ("File",),
    "stdin": (False,),
    "stdin_once": (False,),
    "tty": (False,),
}


def gate_container(image: str, resources: Mapping[str, str] = GATE_RESOURCES) -> dict[str, Any]:
    """Return the gate as a JSON object; docs/design/device-truth.md describes it.

    ``resources`` are its limits and its requests, by name.
    """
    return {
        "name": GATE,
        "image": image,
        # -I: neither the working directory nor a variable adds modules.
        "command": ["python", "-I", "-m", "agent.gate_client"],
        "env": [
            {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
            for name, path in (("POD_UID", "metadata.uid"), ("HOST_IP", "status.hostIP"))
        ],
        "resources": {"limits": dict(resources), "requests": dict(resources)},
        # The restricted Pod Security Standard requires these.
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


#: Fields that ``is_whole`` does not compare with the webhook's gate, and their neutral values.
_NOT_COMPARED: dict[str, Any] = {"image": "", "resources": None, "volume_mounts": None}
_WEBHOOK_GATE = msgspec.structs.replace(
    msgspec.convert(gate_container(""), InitContainer), **_NOT_COMPARED
)


def is_gated(pod: Pod, image: str) -> bool:
    """Return whether the pod's first init container is the webhook's gate with this ``image``.

    False if the pod's annotation ``headroom.gpu/gated`` is not true. Tags and digests are not
    compared: a pod keeps its gate when the setting names a new version.
    """
    first = _first_init_container(pod)
    if first is None or not is_whole(first) or not image:
        return False
    try:
        is_wanted = parse_gated(pod.annotation(GATED) or "true")
    except BadAnnotation:
        return False
    return is_wanted and repository(first.image) == repository(image)


def is_whole(container: Container) -> bool:
    """Return whether the container does the same as the webhook's gate, if its image is the gate's.

    Its image, CPU and memory are not compared. It may have defaults of the API server, and the
    mounts and variables that admission plugins for tokens add to every container. It may have no
    devices.
    """
    if container.name != GATE or not isinstance(container, InitContainer):
        return False
    if asks_for_devices(container):
        return False
    if not all(mount.mount_path in _TOKEN_MOUNTS for mount in container.volume_mounts or ()):
        return False
    env = [each for each in container.env or () if not each.name.startswith(_CLOUD_VARIABLES)]
    defaults = {
        name: None for name, texts in _DEFAULTS.items() if getattr(container, name) in texts
    }
    same = msgspec.structs.replace(container, env=env, **defaults, **_NOT_COMPARED)
    return same == _WEBHOOK_GATE


def has_gate(pod: Pod) -> bool:
    """Return whether the first init container has the gate's name and blocks the later containers.

    Its other fields are not compared: see ``is_gated``.
    """
    first = _first_init_container(pod)
    return (
        first is not None
        and first.name == GATE
        and first.restart_policy != "Always"  # the kubelet does not wait for a sidecar to end
        and not asks_for_devices(first)
    )


def waits(pod: Pod) -> bool:
    """Return whether the pod's gate (``has_gate``) has not succeeded yet, according to its status.

    False also if the pod has no gate or has ended.
    """
    if not has_gate(pod) or pod.ended:
        return False
    statuses = (pod.status.init_container_statuses if pod.status else None) or []
    return not any(
        each.state.terminated.exit_code == 0
        for each in statuses
        if each.name == GATE and each.state and each.state.terminated
    )


def asks_for_devices(container: Container) -> bool:
    """Return whether the container requests an extended resource (a name with a domain) or a
    claim."""
    resources = container.resources
    if resources is None:
        return False
    requests = (resources.limits, resources.requests)
    return bool(resources.claims) or any("/" in name for each in requests for name in each or ())


def _first_init_container(pod: Pod) -> InitContainer | None:
    return next(iter(pod.spec.init_containers or ()), None)


def repository(image: str) -> str:
    """Return the name of an image without tag and digest."""
    folder, slash, last = image.partition("@")[0].rpartition("/")
    return folder + slash + last.partition(":")[0]
