"""Parses a node's annotations, and determines why a node takes no GPU pods."""

from contextlib import suppress
from dataclasses import dataclass

from headroom.contract.annotations import (
    CORDON,
    DEVICE_CHOICE,
    RESERVE,
    DeviceChoice,
    parse_cordon,
    parse_device_choice,
    parse_reserve,
)
from headroom.contract.errors import BadAnnotation
from headroom.contract.gpunode import GPUNode, GPUNodeStatus
from headroom.contract.kube import Node
from headroom.contract.reasons import Reason
from headroom.core.cluster.label_inventory import mig_obstacle, why_not_believed
from headroom.core.placement.policy import Rules


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """The settings in a node's annotations."""

    #: Memory that is kept free on each device.
    reserve_bytes: int = 0
    device_choice: DeviceChoice = DeviceChoice.PREDICTED
    #: UUIDs of devices that take no new pods.
    cordoned: frozenset[str] = frozenset()
    #: The reason if an annotation is invalid. In that case, no pod is placed on the node.
    reason: Reason | None = None
    #: The invalid annotation, its value, and an example.
    detail: str = ""


def node_settings(node: Node | None) -> NodeSettings:
    """Parse the node's annotations."""
    annotations = (node.metadata.annotations if node else None) or {}
    reserve, choice = annotations.get(RESERVE), annotations.get(DEVICE_CHOICE)
    try:
        return NodeSettings(
            0 if reserve is None else parse_reserve(reserve),
            DeviceChoice.PREDICTED if choice is None else parse_device_choice(choice),
            parse_cordon(annotations.get(CORDON, "")),
        )
    except BadAnnotation as err:
        return NodeSettings(reason=Reason.BAD_NODE_ANNOTATION, detail=str(err))


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The settings of a Node that its agent reads from the GPUNode.

    The extender copies them from the Node to the GPUNode, because the agent watches the GPUNode and
    so sees a change immediately.
    """

    #: The device choice. Empty if the Node has no annotation.
    device_choice: str
    #: UUIDs of cordoned devices, in alphabetical order.
    cordoned: tuple[str, ...]


def settings_to_copy(node: Node | None, gpunode: GPUNode) -> AgentSettings | None:
    """Return the settings to be copied from the Node's annotations to its GPUNode.

    Return None if both agree or there is no Node. An annotation that is not valid is ignored.
    """
    if node is None:
        return None
    annotations, spec = node.metadata.annotations or {}, gpunode.spec
    choice, cordoned = spec.device_choice, tuple(spec.cordoned)
    with suppress(BadAnnotation):
        text = annotations.get(DEVICE_CHOICE, "")
        choice = parse_device_choice(text).value if text else ""
    with suppress(BadAnnotation):
        cordoned = tuple(sorted(parse_cordon(annotations.get(CORDON, ""))))
    if (choice, cordoned) == (spec.device_choice, tuple(spec.cordoned)):
        return None
    return AgentSettings(choice, cordoned)


def offers_gpus(node: Node | None, rules: Rules) -> bool:
    """Return whether the node's allocatable contains a managed resource."""
    allocatable = node.status.allocatable if node and node.status else None
    return any(rules.manages(resource) for resource in allocatable or ())


def has_allocatable(node: Node | None, rules: Rules) -> bool:
    """Return whether a device plugin offers a GPU of the node.

    The kubelet keeps a resource without a plugin in the node's allocatable, but with the value 0.
    """
    allocatable = node.status.allocatable if node and node.status else None
    return any(
        rules.manages(resource) and str(amount).strip() not in ("", "0")
        for resource, amount in (allocatable or {}).items()
    )


def obstacle(
    node: Node | None,
    gpunode: GPUNode | None,
    status: GPUNodeStatus | None,
    settings: NodeSettings,
    manager: Reason | None,
    backs_off: bool,
    rules: Rules,
) -> tuple[Reason | None, str]:
    """Return the reason why no pod is placed on the node, and a detail for users.

    If pods are placed on the node, the reason is None and the detail is a warning or empty.
    ``status`` is the node's report, from its agent or its labels. ``manager`` names a foreign
    allocator. ``backs_off`` states whether a pod was evicted from the node recently.
    """
    if node is None:
        return Reason.UNKNOWN_NODE, ""
    if manager is not None:
        return manager, ""
    if settings.reason is not None:
        return settings.reason, settings.detail
    if (by_mig := mig_obstacle(node)) is not None:
        return by_mig
    if backs_off:
        return Reason.EVICTED_RECENTLY, ""
    if status is None:
        reason = Reason.NO_REPORT if rules.require_report else Reason.LABELS_INCOMPLETE
        return reason, why_not_believed(node, rules)
    if gpunode is None or not gpunode.spec.initialised:
        return Reason.NOT_INITIALISED, ""
    if settings.device_choice is DeviceChoice.STEERED and not status.plugin.steered:
        why = status.plugin.choice_obstacle or "its agent has not reported that it steers"
        return None, f"annotation {DEVICE_CHOICE}: steered has no effect: {why}"
    return None, ""
