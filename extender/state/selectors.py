"""Checks whether a node is eligible for a pod by node selector, required node affinity, taints and
cordon, as kube-scheduler does.

All other checks of kube-scheduler, such as CPU, volumes, topology spread and affinity between pods,
are not modeled here. ``not_modeled`` returns those that apply to a pod.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from contract.kube import (
    Node,
    NodeSelectorRequirement,
    NodeSelectorTerm,
    Pod,
    Taint,
    Toleration,
)
from extender.placement.snapshot import Rows, Snapshot
from extender.state.label_requirements import holds

_encode = msgspec.json.Encoder(order="sorted").encode

CORDONED = Taint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")
#: Maximum length of a selector or taint in a message, in characters.
_MAX_QUOTED = 120


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One reason why kube-scheduler does not offer a node for a pod."""

    #: cordoned, taint, selector or affinity.
    code: str
    #: The taint that is not tolerated, or the labels that the node selector requires; else empty.
    what: str = ""

    @property
    def sentence(self) -> str:
        """The obstacle as a phrase to follow the name or the number of nodes."""
        match self.code:
            case "cordoned":
                return "cordoned"
            case "taint":
                return f"taint {self.what}, which the pod does not tolerate"
            case "selector":
                return f"labels do not match the pod's nodeSelector {self.what}"
            case _:
                return "labels do not match the pod's required node affinity"


@dataclass(frozen=True, slots=True)
class Eligible:
    """Which nodes of a snapshot kube-scheduler may offer for a pod."""

    #: (n,) rows of the eligible nodes, in order.
    rows: Rows
    #: Row of each other node -> all reasons why it is not eligible.
    obstacles: Mapping[int, tuple[Obstacle, ...]]

    def counts(self) -> list[tuple[Obstacle, int]]:
        """Return the number of nodes by the first obstacle of each, the most frequent first."""
        return Counter(found[0] for found in self.obstacles.values()).most_common()


def eligible(pod: Pod, node: Node) -> bool:
    """Return whether selector, required node affinity, taints and cordon allow the node."""
    return next(obstacles(pod, node), None) is None


def eligible_nodes(pod: Pod, snap: Snapshot, node_of: Callable[[str], Node | None]) -> Eligible:
    """Check all nodes of the snapshot; ``node_of`` returns the Node with a name.

    A node without a Node object counts as eligible; its verdict reports that it is unknown.
    """
    rows: list[int] = []
    found: dict[int, tuple[Obstacle, ...]] = {}
    for row, terms in enumerate(snap.nodes):
        node = node_of(terms.name)
        if node is None or not (found_here := tuple(obstacles(pod, node))):
            rows.append(row)
        else:
            found[row] = found_here
    return Eligible(np.array(rows, np.int64), found)


def obstacles(pod: Pod, node: Node) -> Iterator[Obstacle]:
    """Yield all reasons why the node is not eligible, in the order of kube-scheduler's checks."""
    tolerations = pod.spec.tolerations or ()
    if cordoned(node) and not tolerated(CORDONED, tolerations):
        yield Obstacle("cordoned")
    for taint in keeping_out(node):
        if not tolerated(taint, tolerations):
            yield Obstacle("taint", _quoted(taint_text(taint)))
    labels = node.metadata.labels or {}
    selector = pod.spec.node_selector or {}
    if any(labels.get(key) != value for key, value in selector.items()):
        yield Obstacle("selector", _quoted(",".join(f"{k}={v}" for k, v in selector.items())))
    affinity = pod.spec.affinity and pod.spec.affinity.node_affinity
    required = affinity and affinity.required_during_scheduling_ignored_during_execution
    if required and not any(
        _matches(term, node.metadata.name, labels) for term in required.node_selector_terms or ()
    ):
        yield Obstacle("affinity")


def eligibility_key(pod: Pod) -> bytes:
    """Return a key that is equal only for pods with the same eligible nodes."""
    affinity = pod.spec.affinity and pod.spec.affinity.node_affinity
    required = affinity and affinity.required_during_scheduling_ignored_during_execution
    return _encode((pod.spec.node_selector, required, pod.spec.tolerations))


def cordoned(node: Node) -> bool:
    return bool(node.spec and node.spec.unschedulable)


def not_modeled(pod: Pod) -> list[str]:
    """Return the checks of kube-scheduler that Headroom does not make for this pod, except CPU and
    memory."""
    spec = pod.spec
    affinity = spec.affinity
    between = affinity and any(
        each and each.required_during_scheduling_ignored_during_execution
        for each in (affinity.pod_affinity, affinity.pod_anti_affinity)
    )
    ports = any(
        port.host_port for container in spec.containers or () for port in container.ports or ()
    )
    volumes = any(each.persistent_volume_claim or each.ephemeral for each in spec.volumes or ())
    checks = {
        "volumes": volumes,
        "topology spread constraints": bool(spec.topology_spread_constraints),
        "affinity between pods": bool(between),
        "host ports": ports,
        "resource claims": bool(spec.resource_claims),
    }
    return [name for name, applies in checks.items() if applies]


def _matches(term: NodeSelectorTerm, name: str, labels: Mapping[str, str]) -> bool:
    """Return whether the node matches the term; an empty term matches no node."""
    on_labels, on_fields = term.match_expressions or (), term.match_fields or ()
    return (
        bool(on_labels or on_fields)
        and all(_holds(requirement, labels) for requirement in on_labels)
        and all(_holds(requirement, {"metadata.name": name}) for requirement in on_fields)
    )


def _holds(requirement: NodeSelectorRequirement, given: Mapping[str, str]) -> bool:
    found = holds(requirement, given)
    return _compares(requirement, given) if found is None else found


def _compares(requirement: NodeSelectorRequirement, given: Mapping[str, str]) -> bool:
    """Evaluate Gt and Lt, which compare whole numbers; any other value does not match."""
    try:
        label, (bound,) = int(given[requirement.key]), map(int, requirement.values or ())
    except (KeyError, ValueError):
        return False
    match requirement.operator:
        case "Gt":
            return label > bound
        case "Lt":
            return label < bound
        case _:
            return False


def tolerated(taint: Taint, tolerations: Iterable[Toleration]) -> bool:
    return any(
        (not t.key or t.key == taint.key)
        and (not t.effect or t.effect == taint.effect)
        and (t.operator == "Exists" or t.value == taint.value)
        for t in tolerations
    )


def keeping_out(node: Node) -> Iterator[Taint]:
    """Yield the taints with effect NoSchedule or NoExecute, without the one that the control plane
    adds to a cordoned node."""
    for taint in (node.spec and node.spec.taints) or ():
        marks_cordon = taint.key == CORDONED.key and cordoned(node)
        if taint.effect in ("NoSchedule", "NoExecute") and not marks_cordon:
            yield taint


def taint_text(taint: Taint) -> str:
    value = f"={taint.value}" if taint.value else ""
    return f"{taint.key}{value}:{taint.effect}"


def _quoted(text: str) -> str:
    return text if len(text) <= _MAX_QUOTED else f"{text[: _MAX_QUOTED - 3]}..."
