"""Finds the nodes that kube-scheduler may offer for a pod, and why it does not offer the others.

A node is *eligible* if node selector, required node affinity, taints and cordon allow it. This
module checks these rules in the same way as kube-scheduler. Other checks of kube-scheduler, such as
CPU, volumes, topology spread and affinity between pods, are not modeled, and ``not_modeled``
returns which of them apply to a pod. A node is *feasible* if kube-scheduler also offered it in its
last filter call for the pod.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from headroom.contract.kube import (
    Node,
    NodeSelector,
    NodeSelectorRequirement,
    NodeSelectorTerm,
    Pod,
    Taint,
    Toleration,
)
from headroom.contract.reasons import Reason
from headroom.core.placement.fit import Verdicts
from headroom.core.placement.snapshot import CODE_OF, Rows, Snapshot

_encode = msgspec.json.Encoder(order="sorted").encode

CORDONED = Taint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")
#: The check that every node in a filter call has passed.
AMOUNTS = "CPU, memory and other resources"
#: The check of nodes on which kube-scheduler allocates GPUs by DRA. Before such a node is in a
#: filter call, it has passed this check too.
DRA_DEVICES = "free devices of DRA"
#: Maximum length of a selector or taint in a message, in characters.
_MAX_QUOTED = 120


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One reason why kube-scheduler does not offer a node for a pod."""

    #: One of cordoned, taint, selector and affinity.
    code: str
    #: The taint that is not tolerated, or the labels that the node selector requires. Otherwise
    #: empty.
    what: str = ""

    @property
    def sentence(self) -> str:
        """The obstacle as a phrase that follows the name or the number of nodes."""
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
    #: All reasons why a node is not eligible, by the row of the node.
    obstacles: Mapping[int, tuple[Obstacle, ...]]

    def counts(self) -> list[tuple[Obstacle, int]]:
        """Return the number of nodes by their first obstacle, most frequent obstacle first."""
        return Counter(found[0] for found in self.obstacles.values()).most_common()


@dataclass(frozen=True, slots=True)
class Feasible:
    """Eligible nodes, except nodes that kube-scheduler omitted from the pod's last filter call."""

    #: (n,) rows of the snapshot.
    rows: Rows
    eligible: Eligible
    #: Rows of the nodes in the last filter call, or None if unknown.
    offered: frozenset[int] | None
    #: Number of eligible nodes that kube-scheduler omitted for reasons unknown to Headroom.
    left_out: int
    #: Checks that kube-scheduler makes for this pod and Headroom does not.
    not_modeled: tuple[str, ...]

    @property
    def obstacles(self) -> list[tuple[Obstacle, int]]:
        return self.eligible.counts()

    def not_checked(self, row: int | None = None) -> tuple[str, ...]:
        """Return the checks that are missing on the node of this row, or without ``row`` on all
        these nodes."""
        known = self.offered is not None if row is None else row in (self.offered or ())
        checked = (AMOUNTS, DRA_DEVICES) if known else ()
        return tuple(check for check in self.not_modeled if check not in checked)


def eligible(pod: Pod, node: Node) -> bool:
    """Return whether selector, required node affinity, taints and cordon allow the node."""
    return next(obstacles(pod, node), None) is None


def eligible_nodes(pod: Pod, snap: Snapshot, node_of: Callable[[str], Node | None]) -> Eligible:
    """Check all nodes of the snapshot. ``node_of`` returns the Node with a name.

    A node without a Node object counts as eligible, because its verdict reports that it is unknown.
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


def feasible(
    pod: Pod, found: Eligible, verdicts: Verdicts, offered: Collection[str] | None
) -> Feasible:
    """Return the eligible nodes that kube-scheduler did not omit.

    ``found`` contains the nodes that are eligible for the pod, and ``verdicts`` the fit on all
    nodes. ``offered`` contains the names of the nodes in the last filter call for this pod, or is
    None if they are unknown.

    A node in a filter call has enough CPU and memory for the pod. A node without a free replica is
    in no filter call, but it is kept, because Headroom can explain it. Checks of volumes, topology
    spread and affinity between pods always count as unchecked, because their results can differ for
    the pod that replaces this pod.
    """
    snap = verdicts.snap
    of_dra = (DRA_DEVICES,) if verdicts.by_dra.any() else ()
    unmodeled = (AMOUNTS, *of_dra, *not_modeled(pod))
    if offered is None:
        return Feasible(found.rows, found, None, 0, unmodeled)
    known = frozenset(snap.row_of[name] for name in offered if name in snap.row_of)
    kept = verdicts.codes[found.rows] == CODE_OF[Reason.NO_REPLICA]
    kept |= np.isin(found.rows, np.array(sorted(known), np.int64))
    rows = found.rows[kept]
    return Feasible(rows, found, known, len(found.rows) - len(rows), unmodeled)


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
    required = _required_affinity(pod)
    if required and not any(
        _matches(term, node.metadata.name, labels) for term in required.node_selector_terms or ()
    ):
        yield Obstacle("affinity")


def eligibility_key(pod: Pod) -> bytes:
    """Return a key that is equal only for pods with the same eligible nodes."""
    return _encode((pod.spec.node_selector, _required_affinity(pod), pod.spec.tolerations))


def _required_affinity(pod: Pod) -> NodeSelector | None:
    affinity = pod.spec.affinity.node_affinity if pod.spec.affinity else None
    return affinity.required_during_scheduling_ignored_during_execution if affinity else None


def cordoned(node: Node) -> bool:
    return bool(node.spec and node.spec.unschedulable)


def not_modeled(pod: Pod) -> list[str]:
    """Return the checks of kube-scheduler for this pod that Headroom does not make.

    Resource amounts such as CPU and memory are omitted, because they apply to every pod.
    """
    spec, affinity = pod.spec, pod.spec.affinity
    checks = {
        "volumes": any(v.persistent_volume_claim or v.ephemeral for v in spec.volumes or ()),
        "topology spread constraints": spec.topology_spread_constraints,
        "affinity between pods": affinity
        and any(
            each and each.required_during_scheduling_ignored_during_execution
            for each in (affinity.pod_affinity, affinity.pod_anti_affinity)
        ),
        "host ports": any(p.host_port for c in spec.containers or () for p in c.ports or ()),
        "resource claims": spec.resource_claims,
    }
    return [name for name, applies in checks.items() if applies]


def _matches(term: NodeSelectorTerm, name: str, labels: Mapping[str, str]) -> bool:
    """Return whether the node matches the term. An empty term matches no node."""
    on_labels, on_fields = term.match_expressions or (), term.match_fields or ()
    return (
        bool(on_labels or on_fields)
        and all(_holds(requirement, labels) for requirement in on_labels)
        and all(_holds(requirement, {"metadata.name": name}) for requirement in on_fields)
    )


def holds(requirement: NodeSelectorRequirement, labels: Mapping[str, str]) -> bool | None:
    """Return whether the labels meet the requirement.

    Return None for an operator that selectors of pods and of nodes do not have in common.
    """
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


def _holds(requirement: NodeSelectorRequirement, labels: Mapping[str, str]) -> bool:
    """Return whether the labels meet the requirement of a node selector.

    Gt and Lt compare whole numbers. Other values and other operators do not match.
    """
    if (found := holds(requirement, labels)) is not None:
        return found
    try:
        label, (bound,) = int(labels[requirement.key]), map(int, requirement.values or ())
    except (KeyError, ValueError):
        return False
    return {"Gt": label > bound, "Lt": label < bound}.get(requirement.operator, False)


def tolerated(taint: Taint, tolerations: Iterable[Toleration]) -> bool:
    return any(
        (not t.key or t.key == taint.key)
        and (not t.effect or t.effect == taint.effect)
        and (t.operator == "Exists" or t.value == taint.value)
        for t in tolerations
    )


def keeping_out(node: Node) -> Iterator[Taint]:
    """Yield the taints with effect NoSchedule or NoExecute.

    The taint that the control plane adds to a cordoned node is skipped.
    """
    for taint in (node.spec and node.spec.taints) or ():
        marks_cordon = taint.key == CORDONED.key and cordoned(node)
        if taint.effect in ("NoSchedule", "NoExecute") and not marks_cordon:
            yield taint


def taint_text(taint: Taint) -> str:
    value = f"={taint.value}" if taint.value else ""
    return f"{taint.key}{value}:{taint.effect}"


def _quoted(text: str) -> str:
    return text if len(text) <= _MAX_QUOTED else f"{text[: _MAX_QUOTED - 3]}..."
