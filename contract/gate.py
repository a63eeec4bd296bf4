"""The gate: an init container that ends well only when the agent of its node says that there is
room for the pod where it is.

It is known by its name and its place. It comes first, so that no other container of the pod has run
while it waits. It asks for no GPU: what an init container holds is given to the containers after
it, and the plugin would not be asked for theirs.
"""

from contract.kube import Container, Pod

#: Name of the container.
GATE = "headroom-gate"


def is_gated(pod: Pod) -> bool:
    """Whether nothing of the pod runs before its gate lets it."""
    first = next(iter(pod.spec.init_containers or ()), None)
    return (
        first is not None
        and first.name == GATE
        and first.restart_policy != "Always"  # the kubelet does not wait for a sidecar to end
        and not _asks_for_devices(first)
    )


def waits(pod: Pod) -> bool:
    """Whether a gated pod has not been let through, as far as its kubelet told."""
    if not is_gated(pod) or pod.ended:
        return False
    statuses = (pod.status.init_container_statuses if pod.status else None) or []
    return not any(
        one.state.terminated.exit_code == 0
        for one in statuses
        if one.name == GATE and one.state and one.state.terminated
    )


def _asks_for_devices(container: Container) -> bool:
    """Extended resources are those with a domain in their name."""
    resources = container.resources
    asked = (resources.limits, resources.requests) if resources else ()
    return any("/" in name for amounts in asked for name in amounts or ())
