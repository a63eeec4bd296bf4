"""The gate: an init container that succeeds only if the pod's device has enough free memory.

The agent of the node decides that. The webhook adds the gate. A pod's author could write a
container of this name that succeeds at once. So a container is a gate only if every field that can
change what it does equals the webhook's. The gate is the first init container, so that no other
container of the pod runs while it waits. It requests no GPU: the kubelet would reuse the init
container's devices for the later containers, and would not request theirs from the device plugin.
"""

from typing import Any

import msgspec

from contract.kube import Container, InitContainer, Pod

#: Name of the container.
GATE = "headroom-gate"

#: Limits and requests of the gate.
_RESOURCES = {"cpu": "100m", "memory": "32Mi"}
#: Prefixes of mounts and variables that other webhooks add to every container, and that cannot
#: change what the gate does: tokens of the ServiceAccount and of a cloud's workload identity.
_TOKENS = "/var/run/secrets/"
_CLOUD_VARIABLES = ("AWS_", "AZURE_")


def gate_container(image: str) -> dict[str, Any]:
    """Return the gate as a JSON object; docs/design/device-truth.md describes it."""
    return {
        "name": GATE,
        "image": image,
        "command": ["python", "-m", "agent.gate_client"],
        "env": [
            {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
            for name, path in (("POD_UID", "metadata.uid"), ("HOST_IP", "status.hostIP"))
        ],
        "resources": {"limits": dict(_RESOURCES), "requests": dict(_RESOURCES)},
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
_NOT_COMPARED = {"image": "", "resources": None, "volume_mounts": None}
_WEBHOOK_GATE = msgspec.structs.replace(
    msgspec.convert(gate_container(""), InitContainer), **_NOT_COMPARED
)


def is_gated(pod: Pod, image: str) -> bool:
    """Return whether the pod's first init container is the webhook's gate with this ``image``.

    Tags and digests are not compared: a pod keeps its gate when the setting names a new version.
    """
    first = _first_init_container(pod)
    if first is None or not is_whole(first) or not image:
        return False
    return repository(first.image) == repository(image)


def is_whole(container: Container) -> bool:
    """Return whether the container does the same as the webhook's gate, if its image is the gate's.

    Its image, CPU and memory are not compared. It may have the mounts and variables that other
    webhooks add to every container, but no extended resources.
    """
    if container.name != GATE or not isinstance(container, InitContainer):
        return False
    if asks_for_devices(container):
        return False
    if not all(mount.mount_path.startswith(_TOKENS) for mount in container.volume_mounts or ()):
        return False
    env = [each for each in container.env or () if not each.name.startswith(_CLOUD_VARIABLES)]
    return msgspec.structs.replace(container, env=env, **_NOT_COMPARED) == _WEBHOOK_GATE


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
    """Return whether the container requests an extended resource (a name with a domain)."""
    resources = container.resources
    requests = (resources.limits, resources.requests) if resources else ()
    return any("/" in name for amounts in requests for name in amounts or ())


def _first_init_container(pod: Pod) -> InitContainer | None:
    return next(iter(pod.spec.init_containers or ()), None)


def repository(image: str) -> str:
    """Return the name of an image without tag and digest."""
    folder, slash, last = image.partition("@")[0].rpartition("/")
    return folder + slash + last.partition(":")[0]
