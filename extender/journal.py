"""The last decision about each pod: what the debug API quotes and what bind reminds itself of.

kube-scheduler's bind call names the pod and nothing else; the pod itself, with the
resourceVersion that makes the Binding conditional, was in the filter call before it.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from contract.kube import Pod
from contract.reasons import Reason


@dataclass(frozen=True, slots=True)
class Decision:
    """One filter call, in numbers."""

    pod: Pod
    decision_id: str
    #: Unix time, seconds.
    at_s: float
    #: The snapshot it was made on.
    generation: int
    offered: int
    fits: int
    #: Reason -> nodes refused for it.
    refused: Mapping[Reason, int]
    #: False: nodes were refused for pods that had not come yet, and may never come.
    sure: bool = True


class Journal:
    """Bounded: the pod decided about longest ago is forgotten first."""

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        self._by_uid: OrderedDict[str, Decision] = OrderedDict()
        self._uid_of: dict[tuple[str, str], str] = {}

    def record(self, decision: Decision) -> None:
        metadata = decision.pod.metadata
        self._by_uid[metadata.uid] = decision
        self._by_uid.move_to_end(metadata.uid)
        self._uid_of[metadata.namespace, metadata.name] = metadata.uid
        while len(self._by_uid) > self._capacity:
            uid, oldest = self._by_uid.popitem(last=False)
            key = (oldest.pod.metadata.namespace, oldest.pod.metadata.name)
            if self._uid_of.get(key) == uid:
                del self._uid_of[key]

    def of_uid(self, uid: str) -> Decision | None:
        return self._by_uid.get(uid)

    def of_pod(self, namespace: str, name: str) -> Decision | None:
        return self._by_uid.get(self._uid_of.get((namespace, name), ""))
