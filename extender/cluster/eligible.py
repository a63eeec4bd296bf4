"""Whether kube-scheduler may put a pod on a node at all, as far as that is cheap to know.

Only who is woken hangs on it: what it does not know, as other resources and affinity between pods,
it takes to be no obstacle, and then a pod is woken in vain.
"""

from collections.abc import Iterable, Mapping

import msgspec

from contract.kube import Node, NodeSelectorRequirement, NodeSelectorTerm, Pod, Taint, Toleration
from extender.cluster.requirements import holds

_encode = msgspec.json.Encoder(order="sorted").encode

CORDONED = Taint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")


def eligible(pod: Pod, node: Node) -> bool:
    """By selector, required node affinity, taints and cordon."""
    labels = node.metadata.labels or {}
    selector = pod.spec.node_selector or {}
    if any(labels.get(key) != value for key, value in selector.items()):
        return False
    affinity = pod.spec.affinity and pod.spec.affinity.node_affinity
    required = affinity and affinity.required_during_scheduling_ignored_during_execution
    if required and not any(
        _matches(term, node.metadata.name, labels) for term in required.node_selector_terms or ()
    ):
        return False
    taints = list(node.spec.taints or ()) if node.spec else []
    if cordoned(node):
        taints.append(CORDONED)
    kept_out = [taint for taint in taints if taint.effect in ("NoSchedule", "NoExecute")]
    return all(tolerated(taint, pod.spec.tolerations or ()) for taint in kept_out)


def sites(pod: Pod) -> bytes:
    """Equal only for pods that are eligible on the same nodes."""
    affinity = pod.spec.affinity and pod.spec.affinity.node_affinity
    required = affinity and affinity.required_during_scheduling_ignored_during_execution
    return _encode((pod.spec.node_selector, required, pod.spec.tolerations))


def cordoned(node: Node) -> bool:
    return bool(node.spec and node.spec.unschedulable)


def _matches(term: NodeSelectorTerm, name: str, labels: Mapping[str, str]) -> bool:
    """A term that asks for nothing matches nothing."""
    on_labels, on_fields = term.match_expressions or (), term.match_fields or ()
    return (
        bool(on_labels or on_fields)
        and all(_holds(asked, labels) for asked in on_labels)
        and all(_holds(asked, {"metadata.name": name}) for asked in on_fields)
    )


def _holds(asked: NodeSelectorRequirement, given: Mapping[str, str]) -> bool:
    found = holds(asked, given)
    return asked.key in given if found is None else found  # numbers are left to kube-scheduler


def tolerated(taint: Taint, tolerations: Iterable[Toleration]) -> bool:
    return any(
        (not t.key or t.key == taint.key)
        and (not t.effect or t.effect == taint.effect)
        and (t.operator == "Exists" or t.value == taint.value)
        for t in tolerations
    )
