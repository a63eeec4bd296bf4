"""The gate: an init container that succeeds only if the pod's device has enough free memory.

The agent of the node decides that. The webhook adds the gate. A pod's author could write a
container of this name that succeeds at once, so it counts only if it equals the webhook's
container in every field. It is the first init container, so that no other container of the pod
runs while it waits. It requests no GPU: the kubelet would reuse the init container's devices for
the later containers, and would not ask the device plugin for theirs.
"""

from typing import Any

import msgspec

from contract.kube import Container, InitContainer, Pod

#: Name of the container.
GATE = "headroom-gate"

_SMALL = {"cpu": "100m", "memory": "32Mi"}
#: Mounts and variables that other webhooks add to every container, and that cannot change what the
#: gate does: tokens of the ServiceAccount and of a cloud's workload identity.
_TOKENS = "/var/run/secrets/"
_OF_CLOUDS = ("AWS_", "AZURE_")


def gate_container(image: str) -> dict[str, Any]:
    """Return the gate as docs/device-truth.md describes it, in JSON's types."""
    return {
        "name": GATE,
        "image": image,
        "command": ["python", "-m", "agent.gate_client"],
        "env": [
            {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
            for name, path in (("POD_UID", "metadata.uid"), ("HOST_IP", "status.hostIP"))
        ],
        "resources": {"limits": dict(_SMALL), "requests": dict(_SMALL)},
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


_COMPARED = {"image": "", "resources": None, "volume_mounts": None}
_MADE = msgspec.structs.replace(msgspec.convert(gate_container(""), InitContainer), **_COMPARED)


def is_gated(pod: Pod, image: str) -> bool:
    """Return whether the pod's first init container is the webhook's gate with this ``image``.

    Tags and digests are not compared: a pod keeps its gate when the setting names a new version.
    """
    first = _first(pod)
    if first is None or not is_whole(first) or not image:
        return False
    return repository(first.image) == repository(image)


def is_whole(container: Container) -> bool:
    """Return whether the container equals the webhook's gate in every field but the image."""
    if container.name != GATE or not isinstance(container, InitContainer):
        return False
    if asks_for_devices(container):
        return False
    if not all(mount.mount_path.startswith(_TOKENS) for mount in container.volume_mounts or ()):
        return False
    env = [each for each in container.env or () if not each.name.startswith(_OF_CLOUDS)]
    return msgspec.structs.replace(container, env=env, **_COMPARED) == _MADE


def has_gate(pod: Pod) -> bool:
    """Return whether the first init container has the gate's name and can block the pod."""
    first = _first(pod)
    return (
        first is not None
        and first.name == GATE
        and first.restart_policy != "Always"  # the kubelet does not wait for a sidecar to end
        and not asks_for_devices(first)
    )


def waits(pod: Pod) -> bool:
    """Return whether the pod has a gate that has not succeeded, according to its status."""
    if not has_gate(pod) or pod.ended:
        return False
    statuses = (pod.status.init_container_statuses if pod.status else None) or []
    return not any(
        each.state.terminated.exit_code == 0
        for each in statuses
        if each.name == GATE and each.state and each.state.terminated
    )


def asks_for_devices(container: Container) -> bool:
    """Return whether the container requests extended resources: names with a domain."""
    resources = container.resources
    asked = (resources.limits, resources.requests) if resources else ()
    return any("/" in name for amounts in asked for name in amounts or ())


def _first(pod: Pod) -> InitContainer | None:
    return next(iter(pod.spec.init_containers or ()), None)


def repository(image: str) -> str:
    """Return the name of an image without tag and digest."""
    folder, slash, last = image.partition("@")[0].rpartition("/")
    return folder + slash + last.partition(":")[0]
