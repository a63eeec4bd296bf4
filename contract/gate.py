"""The gate: an init container that ends well only when the agent of its node says that there is
room for the pod where it is.

The webhook makes it. An author can write a container of its name that ends at once, so it counts
only if it is the webhook's container whole. It comes first, so that no other container of the pod
has run while it waits. It asks for no GPU: what an init container holds is given to the containers
after it, and the plugin would not be asked for theirs.
"""

from typing import Any

import msgspec

from contract.kube import Container, InitContainer, Pod

#: Name of the container.
GATE = "headroom-gate"

_SMALL = {"cpu": "100m", "memory": "32Mi"}
#: What others add to every container of a pod, and neither Python nor the gate reads: tokens of
#: the ServiceAccount and of a cloud's workload identity, and the variables that name them.
_TOKENS = "/var/run/secrets/"
_OF_CLOUDS = ("AWS_", "AZURE_")


def gate_container(image: str) -> dict[str, Any]:
    """As docs/device-truth.md describes it."""
    return {
        "name": GATE,
        "image": image,
        "command": ["python", "-m", "agent.gate_client"],
        "env": [
            {
                "name": name,
                "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}},
            }
            for name, path in (("POD_UID", "metadata.uid"), ("HOST_IP", "status.hostIP"))
        ],
        "resources": {"limits": dict(_SMALL), "requests": dict(_SMALL)},
        # What the strictest of the Pod Security Standards asks for.
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
    """Whether nothing of the pod runs before the webhook's gate, made with ``image``, lets it.

    Tags and digests are not compared: a pod keeps its gate when the setting names a new version.
    """
    first = _first(pod)
    if first is None or not is_whole(first) or not image:
        return False
    return repository(first.image) == repository(image)


def is_whole(container: Container) -> bool:
    """Whether it is what the webhook makes, whatever its image is."""
    if container.name != GATE or not isinstance(container, InitContainer):
        return False
    if asks_for_devices(container):
        return False
    if not all(mount.mount_path.startswith(_TOKENS) for mount in container.volume_mounts or ()):
        return False
    env = [each for each in container.env or () if not each.name.startswith(_OF_CLOUDS)]
    return msgspec.structs.replace(container, env=env, **_COMPARED) == _MADE


def has_gate(pod: Pod) -> bool:
    """Whether the first container of the pod has the gate's name and may hold it back."""
    first = _first(pod)
    return (
        first is not None
        and first.name == GATE
        and first.restart_policy != "Always"  # the kubelet does not wait for a sidecar to end
        and not asks_for_devices(first)
    )


def waits(pod: Pod) -> bool:
    """Whether a pod with a gate has not been let through, as far as its kubelet told."""
    if not has_gate(pod) or pod.ended:
        return False
    statuses = (pod.status.init_container_statuses if pod.status else None) or []
    return not any(
        one.state.terminated.exit_code == 0
        for one in statuses
        if one.name == GATE and one.state and one.state.terminated
    )


def asks_for_devices(container: Container) -> bool:
    """Extended resources are those with a domain in their name."""
    resources = container.resources
    asked = (resources.limits, resources.requests) if resources else ()
    return any("/" in name for amounts in asked for name in amounts or ())


def _first(pod: Pod) -> InitContainer | None:
    return next(iter(pod.spec.init_containers or ()), None)


def repository(image: str) -> str:
    """The name of an image without tag and digest."""
    folder, slash, last = image.partition("@")[0].rpartition("/")
    return folder + slash + last.partition(":")[0]
