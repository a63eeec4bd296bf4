"""Evaluates one requirement of a label selector, for pods and nodes alike."""

from collections.abc import Mapping

from contract.kube import NodeSelectorRequirement


def holds(requirement: NodeSelectorRequirement, labels: Mapping[str, str]) -> bool | None:
    """Return whether the labels meet the requirement; None if not all selectors support its
    operator."""
    value, values = labels.get(requirement.key), requirement.values or ()
    match requirement.operator:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case _:
            return None
