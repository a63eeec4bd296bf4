"""The gate: an init container that succeeds only if the pod's device has enough free memory.

The agent of the node decides this. The gate is the first init container, so that no other container
of the pod runs while it waits. It requests no GPU, because the kubelet would reuse the init
container's devices for the later containers instead of requesting devices from the device plugin.

The author of a pod could write a container with this name that succeeds immediately. Two rules
prevent this (docs/design/adr/0060). First, the webhook replaces every container with this name when
a GPU pod is created. Second, a container counts as the gate only if every field has the webhook's
value, except for fields that the API server and the admission plugins listed by ``is_whole`` may
change.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from headroom.contract.annotations import parse_gated
from headroom.contract.errors import BadAnnotation
from headroom.contract.keys import GATED
from headroom.contract.kube import Container, InitContainer, Pod

#: Name of the gate's container.
GATE = "headroom-gate"
#: Port of the agent to which the gate sends its requests.
PORT = 9410

#: Requests and limits of the gate, unless larger values are required.
GATE_RESOURCES: Mapping[str, str] = {"cpu": "100m", "memory": "32Mi"}
#: Paths at which other admission plugins mount tokens into every container: tokens of the
#: ServiceAccount and of a cloud's workload identity. They are compared as a whole, because the API
#: server stores paths with "..".
_TOKEN_MOUNTS = frozenset(
    (
        "/var/run/secrets/kubernetes.io/serviceaccount",
        "/var/run/secrets/eks.amazonaws.com/serviceaccount",
        "/var/run/secrets/pods.eks.amazonaws.com/serviceaccount",
        "/var/run/secrets/azure/tokens",
    )
)
#: Prefixes of variables that these plugins add. The gate does not read such variables.
_CLOUD_VARIABLES = ("AWS_", "AZURE_")
#: Values that the API server or the admission plugin AlwaysPullImages may write, by field.
_DEFAULTS: Mapping[str, tuple[object, ...]] = {
    "image_pull_policy": ("IfNotPresent", "Always"),
    # The kubelet mounts an empty file at this path, so another path could hide the gate's program.
    "termination_message_path": ("/dev/termination-log",),
    "termination_message_policy": ("File",),
    "stdin": (False,),
    "stdin_once": (False,),
    "tty": (False,),
}


def gate_container(image: str, resources: Mapping[str, str] = GATE_RESOURCES) -> dict[str, Any]:
    """Return the gate as a JSON object. docs/design/device-truth.md describes it.

    ``resources`` contains its requests, which are also its limits, by name.
    """
    return {
        "name": GATE,
        "image": image,
        # -I keeps the working directory and environment variables from adding modules.
        "command": ["python", "-I", "-m", "agent.gate_client"],
        "env": [
            {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
            for name, path in (("POD_UID", "metadata.uid"), ("HOST_IP", "status.hostIP"))
        ],
        "resources": {"limits": dict(resources), "requests": dict(resources)},
        # The restricted Pod Security Standard requires these fields.
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


#: Fields of the webhook's gate that ``is_whole`` does not compare, with neutral values.
_NOT_COMPARED: dict[str, Any] = {"image": "", "resources": None, "volume_mounts": None}
_WEBHOOK_GATE = msgspec.structs.replace(
    msgspec.convert(gate_container(""), InitContainer), **_NOT_COMPARED
)


def is_gated(pod: Pod, image: str) -> bool:
    """Return whether the pod's first init container is the webhook's gate with this ``image``.

    Return False if the pod's annotation ``headroom.gpu/gated`` is not true. Tags and digests are
    not compared, so a pod keeps its gate when the setting names a new version.
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
    """Return whether the container works like the webhook's gate, provided that its image does.

    Image, CPU and memory are not compared. The container may have defaults of the API server, and
    the mounts and variables that admission plugins for tokens add to every container. It must not
    request devices.
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

    Its other fields are not compared (see ``is_gated``).
    """
    first = _first_init_container(pod)
    return (
        first is not None
        and first.name == GATE
        and first.restart_policy != "Always"  # The kubelet does not wait for a sidecar to end.
        and not asks_for_devices(first)
    )


def waits(pod: Pod) -> bool:
    """Return whether the pod has a gate (``has_gate``) that has not succeeded yet according to its
    status.

    Return False if the pod has no gate or has ended.
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
    """Return the name of an image without its tag and digest."""
    folder, slash, last = image.partition("@")[0].rpartition("/")
    return folder + slash + last.partition(":")[0]
