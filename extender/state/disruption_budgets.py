"""Matches pods to PodDisruptionBudgets as kube-scheduler does when it preempts.

A budget matches no pods if its selector is missing, empty or invalid. It never matches a pod
without labels, nor a pod in ``status.disruptedPods``, whose eviction it has counted already
(``filterPodsWithPDBViolation``, pkg/scheduler/framework/plugins/defaultpreemption).
"""

from collections.abc import Iterable, Mapping

from contract.kube import LabelSelector, Pod, PodDisruptionBudget
from extender.placement.victims import Budget
from extender.state.label_requirements import holds


class Budgets:
    """The PodDisruptionBudgets of the cluster."""

    def __init__(self) -> None:
        #: Whether budgets are not listed yet. Until then it is unknown which pods they protect.
        self.awaited = False
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
        if not self._held:
            return found
        listed = list(pods)
        for (namespace, _), budget in self._held.items():
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
    if not labels or selector is None:
        return False
    if pod.metadata.name in (budget.status.disrupted_pods or ()):
        return False
    return selects(selector, labels)


def selects(selector: LabelSelector, labels: Mapping[str, str]) -> bool:
    exact, expressions = selector.match_labels or {}, selector.match_expressions or ()
    return (
        bool(exact or expressions)
        and all(labels.get(name) == value for name, value in exact.items())
        # An invalid expression matches no pod.
        and all(holds(asked, labels) for asked in expressions)
    )
