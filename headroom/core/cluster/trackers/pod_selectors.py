"""Matches pods to the label selectors of PodDisruptionBudgets and of scored pod affinity terms.

``prefers`` and ``Neighbours`` detect preferences that could make kube-scheduler choose another node
than Headroom. kube-scheduler scores nodes by the pod's preferences for nodes and for pods there, by
the affinity terms of these pods, and by taints with effect PreferNoSchedule. In the shipped
profile, all its other scores have a lower weight than Headroom's score
(docs/design/kube-scheduler.md). A condition that is expensive to check counts as a preference.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from headroom.contract.kube import LabelSelector, Node, Pod, PodAffinityTerm, PodDisruptionBudget
from headroom.core.rules.eligible_nodes import holds, tolerated
from headroom.core.tracker import LastSeen, Tracker


@dataclass(frozen=True, slots=True)
class Budget:
    """A disruption budget, which allows ``allowed`` more disruptions of its pods."""

    allowed: int
    uids: frozenset[str]


class Budgets:
    """The PodDisruptionBudgets of the cluster, matched as in kube-scheduler's preemption.

    A budget matches no pods if its selector is missing, empty or invalid. It never matches a pod
    without labels, or a pod in ``status.disruptedPods``, whose eviction it has already counted
    (``filterPodsWithPDBViolation``, pkg/scheduler/framework/plugins/defaultpreemption).
    """

    def __init__(self) -> None:
        #: Whether the budgets are not listed yet, so that it is unknown which pods they protect.
        self.unlisted = False
        self._held: dict[tuple[str, str], PodDisruptionBudget] = {}

    def see(self, budget: PodDisruptionBudget) -> None:
        self._held[key(budget)] = budget

    def lose(self, namespace: str, name: str) -> None:
        self._held.pop((namespace, name), None)

    def known(self) -> set[tuple[str, str]]:
        return set(self._held)

    def over(self, pods: Iterable[Pod]) -> list[Budget]:
        """Return the budgets that match at least one of these pods."""
        found: list[Budget] = []
        listed = list(pods) if self._held else []
        for (namespace, _), budget in list(self._held.items()):  # another thread may change it
            uids = frozenset(
                pod.metadata.uid
                for pod in listed
                if pod.metadata.namespace == namespace and _covers(budget, pod)
            )
            if uids:
                found.append(Budget(budget.status.disruptions_allowed, uids))
        return found


def key(budget: PodDisruptionBudget) -> tuple[str, str]:
    return budget.metadata.namespace, budget.metadata.name


def _covers(budget: PodDisruptionBudget, pod: Pod) -> bool:
    labels, selector = pod.metadata.labels, budget.spec.selector
    disrupted = pod.metadata.name in (budget.status.disrupted_pods or ())
    return bool(labels) and selector is not None and not disrupted and selects(selector, labels)


def selects(selector: LabelSelector, labels: Mapping[str, str] | None) -> bool:
    """Return whether the selector matches the labels. An empty selector matches no labels."""
    labels = labels or {}
    exact, expressions = selector.match_labels or {}, selector.match_expressions or ()
    return (
        bool(exact or expressions)
        and all(labels.get(name) == value for name, value in exact.items())
        # An invalid expression matches no pod.
        and all(holds(asked, labels) for asked in expressions)
    )


#: In a term that selects its namespaces by label, this stands for all namespaces.
_ANY = ""
#: A namespace, and the JSON of a label selector for pods in it.
_Key = tuple[str, bytes]


def prefers(pod: Pod) -> bool:
    """Return whether the pod prefers some of its eligible nodes."""
    spec, affinity = pod.spec, pod.spec.affinity
    of_nodes = affinity and affinity.node_affinity
    return bool(
        spec.topology_spread_constraints
        or (of_nodes and of_nodes.preferred_during_scheduling_ignored_during_execution)
        or has_affinity_terms(pod)
    )


def has_affinity_terms(pod: Pod) -> bool:
    """Return whether the pod has scored affinity terms for other pods. Any thread may call this."""
    return any(True for _ in _terms(pod))


def prefers_no_schedule(node: Node, pod: Pod) -> bool:
    """Return whether the node has a PreferNoSchedule taint that the pod does not tolerate."""
    return any(
        taint.effect == "PreferNoSchedule" and not tolerated(taint, pod.spec.tolerations or ())
        for taint in (node.spec and node.spec.taints) or ()
    )


class Neighbours(Tracker):
    """The scored pod affinity terms of the pods in the cluster. Most pods have no such terms."""

    def __init__(self) -> None:
        #: The terms of each pod as namespace and selector, by uid.
        self._terms_of: dict[str, frozenset[_Key]] = {}
        #: Number of pods with each term. Replicas of a workload have equal terms.
        self._counts: Counter[_Key] = Counter()
        #: Selectors for the pods in each namespace.
        self._selectors: dict[str, dict[bytes, LabelSelector]] = {}

    def pod_seen(self, pod: Pod, managed: bool) -> None:
        self.pod_gone(pod.metadata.uid, None)
        if pod.ended or not has_affinity_terms(pod):
            return
        terms = set[_Key]()
        for term in _terms(pod):
            selector = term.label_selector
            if selector is None:
                continue  # matches no pod
            text = msgspec.json.encode(selector)
            for namespace in _namespaces(term, pod.metadata.namespace):
                terms.add((namespace, text))
                self._selectors.setdefault(namespace, {})[text] = selector
        self._terms_of[pod.metadata.uid] = frozenset(terms)
        self._counts.update(terms)

    def pod_gone(self, uid: str, last: LastSeen | None) -> None:
        for namespace, text in self._terms_of.pop(uid, ()):
            self._counts[namespace, text] -= 1
            if not self._counts[namespace, text]:
                del self._counts[namespace, text], self._selectors[namespace][text]
                if not self._selectors[namespace]:
                    del self._selectors[namespace]

    def known(self) -> set[str]:
        """Return the uids of pods with terms."""
        return set(self._terms_of)

    def match(self, pod: Pod) -> bool:
        """Return whether the terms of any pod match this pod."""
        return any(
            # In affinity terms an empty selector matches all pods, but not in budgets.
            not (of.match_labels or of.match_expressions) or selects(of, pod.metadata.labels)
            for namespace in (pod.metadata.namespace, _ANY)
            for of in self._selectors.get(namespace, {}).values()
        )


def _terms(pod: Pod) -> Iterator[PodAffinityTerm]:
    """Yield the terms with which the pod affects the scores of nodes, as a new pod or as a pod on a
    node."""
    affinity = pod.spec.affinity
    if affinity is None:
        return
    if affinity.pod_affinity:
        yield from affinity.pod_affinity.required_during_scheduling_ignored_during_execution or ()
    for kind in (affinity.pod_affinity, affinity.pod_anti_affinity):
        weighted = kind and kind.preferred_during_scheduling_ignored_during_execution
        yield from (each.pod_affinity_term for each in weighted or ())


def _namespaces(term: PodAffinityTerm, own: str) -> list[str]:
    if term.namespace_selector is not None:
        return [_ANY]
    return term.namespaces or [own]
