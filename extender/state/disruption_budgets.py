"""Which pods a disruption budget is about, as kube-scheduler reads it when it preempts.

A budget without a selector, or with an empty one, is about nobody there, nor is one whose selector
is not valid; a pod without labels, or one whose eviction the budget has counted already, is none of
its pods (``filterPodsWithPDBViolation``, pkg/scheduler/framework/plugins/defaultpreemption).
"""

from collections.abc import Iterable, Mapping

from contract.kube import LabelSelector, Pod, PodDisruptionBudget
from extender.placement.victims import Budget
from extender.state.label_requirements import holds


class Budgets:
    def __init__(self) -> None:
        #: Whether their list is yet to come; until then nobody knows whom not to evict.
        self.awaited = False
        self._held: dict[tuple[str, str], PodDisruptionBudget] = {}

    def see(self, budget: PodDisruptionBudget) -> None:
        self._held[key(budget)] = budget

    def lose(self, namespace: str, name: str) -> None:
        self._held.pop((namespace, name), None)

    def known(self) -> set[tuple[str, str]]:
        return set(self._held)

    def over(self, pods: Iterable[Pod]) -> list[Budget]:
        """The budgets that some of these pods come under."""
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
        # One that is not valid is about nobody.
        and all(holds(asked, labels) for asked in expressions)
    )
