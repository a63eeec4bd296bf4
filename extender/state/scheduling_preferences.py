"""Whether something that users said could have kube-scheduler prefer another node than ours.

It scores nodes by what a pod prefers of nodes and of the pods there, by what those pods say of the
newcomer, and by taints PreferNoSchedule. All else that it scores counts less than Headroom's
choice, in the profile that is shipped (docs/scheduler.md). What would take long to tell is taken
for a preference.
"""

from collections import Counter
from collections.abc import Iterator

import msgspec

from contract.kube import LabelSelector, Node, Pod, PodAffinityTerm
from extender.state.disruption_budgets import selects
from extender.state.selectors import tolerated

#: Stands for all namespaces, of a term that names those it is about by their labels.
_ANY = ""
#: A namespace, and a selector of pods there as it is written.
_Key = tuple[str, bytes]


def prefers(pod: Pod) -> bool:
    """Whether the pod says which nodes suit it better than others that it may run on."""
    spec, affinity = pod.spec, pod.spec.affinity
    of_nodes = affinity and affinity.node_affinity
    return bool(
        spec.topology_spread_constraints
        or (of_nodes and of_nodes.preferred_during_scheduling_ignored_during_execution)
        or says(pod)
    )


def says(pod: Pod) -> bool:
    """Whether it would rather have certain others beside it, or not; from any thread."""
    return any(True for _ in _terms(pod))


def shuns(node: Node, pod: Pod) -> bool:
    """Whether a taint of the node would rather have the pod elsewhere."""
    return any(
        taint.effect == "PreferNoSchedule" and not tolerated(taint, pod.spec.tolerations or ())
        for taint in (node.spec and node.spec.taints) or ()
    )


class Neighbours:
    """What the pods of the cluster say of others to have beside them or not; of most, nothing."""

    def __init__(self) -> None:
        #: Uid -> what the pod says, and of pods of which namespace.
        self._said: dict[str, frozenset[_Key]] = {}
        #: How many pods say it: replicas say the same.
        self._sayers: Counter[_Key] = Counter()
        #: Namespace -> whom it is said of there.
        self._selectors: dict[str, dict[bytes, LabelSelector]] = {}

    def see(self, pod: Pod) -> None:
        self.lose(pod.metadata.uid)
        if pod.ended or not says(pod):
            return
        said = set[_Key]()
        for term in _terms(pod):
            selector = term.label_selector
            if selector is None:
                continue  # of nobody
            text = msgspec.json.encode(selector)
            for namespace in _namespaces(term, pod.metadata.namespace):
                said.add((namespace, text))
                self._selectors.setdefault(namespace, {})[text] = selector
        self._said[pod.metadata.uid] = frozenset(said)
        self._sayers.update(said)

    def lose(self, uid: str) -> None:
        for key in self._said.pop(uid, ()):
            self._sayers[key] -= 1
            if self._sayers[key]:
                continue
            del self._sayers[key]
            namespace, text = key
            del self._selectors[namespace][text]
            if not self._selectors[namespace]:
                del self._selectors[namespace]

    def known(self) -> set[str]:
        """The uids of those that say something."""
        return set(self._said)

    def speak_of(self, pod: Pod) -> bool:
        """Whether some pod would have this one beside it, or would not."""
        labels = pod.metadata.labels or {}
        return any(
            # One that is empty is about all; ``selects`` is as budgets read it.
            not (of.match_labels or of.match_expressions) or selects(of, labels)
            for namespace in (pod.metadata.namespace, _ANY)
            for of in self._selectors.get(namespace, {}).values()
        )


def _terms(pod: Pod) -> Iterator[PodAffinityTerm]:
    """Those that kube-scheduler scores by, of the newcomer or of who is there."""
    affinity = pod.spec.affinity
    if affinity is None:
        return
    if affinity.pod_affinity:
        yield from affinity.pod_affinity.required_during_scheduling_ignored_during_execution or ()
    for either in (affinity.pod_affinity, affinity.pod_anti_affinity):
        weighted = either and either.preferred_during_scheduling_ignored_during_execution
        yield from (each.pod_affinity_term for each in weighted or ())


def _namespaces(term: PodAffinityTerm, own: str) -> list[str]:
    if term.namespace_selector is not None:
        return [_ANY]
    return term.namespaces or [own]
