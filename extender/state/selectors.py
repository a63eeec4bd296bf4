"""Whether kube-scheduler may put a pod on a node at all: node selector, required node affinity,
taints and cordon, read as kube-scheduler reads them.

Everything else that kube-scheduler checks by itself, such as CPU, volumes, spreading and affinity
between pods, is not modeled here: ``not_modeled`` names the checks that a pod is subject to.
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
#: Characters of a selector or a taint that a sentence quotes.
_MOST_QUOTED = 120


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One reason why kube-scheduler does not offer a node for a pod."""

    #: cordoned, taint, selector or affinity.
    code: str
    #: The taint that is not tolerated, or the labels that the node selector asks for; else empty.
    what: str = ""

    @property
    def sentence(self) -> str:
        """The obstacle in words that follow the name or the number of nodes."""
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
    #: Row of each other node -> everything that keeps the pod off it.
    obstacles: Mapping[int, tuple[Obstacle, ...]]

    def counts(self) -> list[tuple[Obstacle, int]]:
        """Nodes by the first obstacle of each, the most frequent first."""
        return Counter(found[0] for found in self.obstacles.values()).most_common()


def eligible(pod: Pod, node: Node) -> bool:
    """By selector, required node affinity, taints and cordon."""
    return next(obstacles(pod, node), None) is None


def eligible_nodes(pod: Pod, snap: Snapshot, node_of: Callable[[str], Node | None]) -> Eligible:
    """``node_of`` returns the Node of that name. A node without one counts as eligible: its verdict
    says that it is not known."""
    rows: list[int] = []
    found: dict[int, tuple[Obstacle, ...]] = {}
    for row, terms in enumerate(snap.nodes):
        node = node_of(terms.name)
        if node is None or not (here := tuple(obstacles(pod, node))):
            rows.append(row)
        else:
            found[row] = here
    return Eligible(np.array(rows, np.int64), found)


def obstacles(pod: Pod, node: Node) -> Iterator[Obstacle]:
    """Everything that keeps the pod off the node, in the order in which kube-scheduler looks."""
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
    """Equal only for pods that are eligible on the same nodes."""
    affinity = pod.spec.affinity and pod.spec.affinity.node_affinity
    required = affinity and affinity.required_during_scheduling_ignored_during_execution
    return _encode((pod.spec.node_selector, required, pod.spec.tolerations))


def cordoned(node: Node) -> bool:
    return bool(node.spec and node.spec.unschedulable)


def not_modeled(pod: Pod) -> list[str]:
    """Returns the checks of kube-scheduler that Headroom does not make for this pod, without CPU
    and memory."""
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
    """A term that asks for nothing matches nothing."""
    on_labels, on_fields = term.match_expressions or (), term.match_fields or ()
    return (
        bool(on_labels or on_fields)
        and all(_holds(asked, labels) for asked in on_labels)
        and all(_holds(asked, {"metadata.name": name}) for asked in on_fields)
    )


def _holds(asked: NodeSelectorRequirement, given: Mapping[str, str]) -> bool:
    found = holds(asked, given)
    return _compares(asked, given) if found is None else found


def _compares(asked: NodeSelectorRequirement, given: Mapping[str, str]) -> bool:
    """Gt and Lt compare whole numbers; what is no such number does not match."""
    try:
        label, (bound,) = int(given[asked.key]), map(int, asked.values or ())
    except (KeyError, ValueError):
        return False
    match asked.operator:
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
    """The taints that keep pods away that do not tolerate them, without the one that the control
    plane adds to a cordoned node."""
    for taint in (node.spec and node.spec.taints) or ():
        marks_cordon = taint.key == CORDONED.key and cordoned(node)
        if taint.effect in ("NoSchedule", "NoExecute") and not marks_cordon:
            yield taint


def taint_text(taint: Taint) -> str:
    value = f"={taint.value}" if taint.value else ""
    return f"{taint.key}{value}:{taint.effect}"


def _quoted(text: str) -> str:
    return text if len(text) <= _MOST_QUOTED else f"{text[: _MOST_QUOTED - 3]}..."
