"""Decides which resources of a node can be steered, and why the others cannot. Pure."""

from dataclasses import dataclass

from contract.gpunode import GPUNodeStatus

NOT_PERMITTED = (
    "not permitted: the agent has the kubelet's device plugin directory read-only"
    " (chart value agent.steering.permitted, or component deploy/components/steering)"
)
NOTHING_SHARED = "no GPU of the node is shared, so the device plugin has no choice to make"
SHARING_UNKNOWN = "how the device plugin shares the GPUs cannot be read"


@dataclass(frozen=True, slots=True)
class Eligibility:
    resources: frozenset[str] = frozenset()
    #: Resources that must not be steered. While data is missing, a resource is in neither set and
    #: its steering stays as it is.
    excluded: frozenset[str] = frozenset()
    #: One sentence for each reason why a resource is not steered.
    obstacles: tuple[str, ...] = ()


def eligibility(sample: GPUNodeStatus, permitted: bool) -> Eligibility:
    """Return which resources can be steered.

    ``permitted``: whether the agent may write to the kubelet's device plugin directory.
    """
    if not permitted:
        return Eligibility(obstacles=(NOT_PERMITTED,))
    numa_nodes: dict[str, set[int | None]] = {}
    for device in sample.devices:
        if device.sharing != "none" and device.resource:
            numa_nodes.setdefault(device.resource, set()).add(device.numa_node)
    shared = frozenset(numa_nodes)
    plugin = sample.plugin
    if not shared:
        unread = bool(sample.devices) and plugin.allocation_policy == "unknown"
        return Eligibility(obstacles=(SHARING_UNKNOWN if unread else NOTHING_SHARED,))
    if plugin.topology_manager_policy == "none":
        return Eligibility(shared)
    # With a topology policy the kubelet may offer GPUs of one NUMA node only, or ignore the
    # preferred GPU.
    divided = frozenset(resource for resource, nodes in numa_nodes.items() if len(nodes) > 1)
    policy = plugin.topology_manager_policy
    stated = f"has policy {policy}" if policy else "has a policy that cannot be read"
    return Eligibility(
        shared - divided,
        divided if policy else frozenset(),
        tuple(
            f"{resource}: the kubelet's topology manager {stated}, and the GPUs are on several"
            " NUMA nodes, so it can overrule the choice"
            for resource in sorted(divided)
        ),
    )
