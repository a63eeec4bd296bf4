"""Whether labels are as one line of a selector asks, of pods and of nodes alike."""

from collections.abc import Mapping

from contract.kube import NodeSelectorRequirement


def holds(asked: NodeSelectorRequirement, labels: Mapping[str, str]) -> bool | None:
    """None: it is none of the operators that all selectors know."""
    value, values = labels.get(asked.key), asked.values or ()
    match asked.operator:
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
