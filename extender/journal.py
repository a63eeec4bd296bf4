"""What was decided lately: the last decision about each pod, which bind and waking remind
themselves of, and the records of attempts, which the debug API reads.

kube-scheduler's bind call names the pod and nothing else; the pod itself, with the
resourceVersion that makes the Binding conditional, was in the filter call before it.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from contract.decision import decision_id
from contract.kube import Pod
from contract.reasons import Reason
from extender.placement.snapshot import CODE_OF
from extender.records import DEFAULT_BOUNDS, Asked, Bounds, Filtered, Part, Records


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
    took_s: float = 0.0
    asked: tuple[Asked, ...] = ()
    #: The node, where one alone fits.
    only: str = ""
    #: All nodes were let pass: the mode was observe.
    observed: bool = False


class Journal:
    """Bounded: the pod decided about longest ago is forgotten first."""

    def __init__(self, bounds: Bounds = DEFAULT_BOUNDS) -> None:
        self.records = Records(bounds)
        self._by_uid: OrderedDict[str, Decision] = OrderedDict()
        self._uid_of: dict[tuple[str, str], str] = {}

    def record(self, decision: Decision) -> None:
        metadata = decision.pod.metadata
        self._by_uid[metadata.uid] = decision
        self._by_uid.move_to_end(metadata.uid)
        self._uid_of[metadata.namespace, metadata.name] = metadata.uid
        while len(self._by_uid) > self.records.bounds.decisions:
            uid, oldest = self._by_uid.popitem(last=False)
            key = (oldest.pod.metadata.namespace, oldest.pod.metadata.name)
            if self._uid_of.get(key) == uid:
                del self._uid_of[key]
        part = Filtered(
            decision.at_s,
            micros(decision.took_s),
            decision.generation,
            decision.offered,
            decision.fits,
            {CODE_OF[reason]: nodes for reason, nodes in decision.refused.items()},
            decision.asked,
            decision.observed,
        )
        self.note(decision.pod, part, decision.at_s, decision.only)

    def note(self, pod: Pod, part: Part, at_s: float, node: str = "") -> None:
        """Put on record what a verb made of this very version of the pod."""
        metadata = pod.metadata
        which = decision_id(metadata.uid, metadata.resource_version)
        self.records.note(which, metadata.namespace, metadata.name, part, at_s, node)

    def latest(self, most: int) -> list[Decision]:
        """The last about each pod, at most so many, the newest first."""
        return list(islice(reversed(list(self._by_uid.values())), most))

    @property
    def shown(self) -> int:
        """Pods that are kept as kube-scheduler showed them last."""
        return len(self._by_uid)

    def of_uid(self, uid: str) -> Decision | None:
        return self._by_uid.get(uid)

    def of_pod(self, namespace: str, name: str) -> Decision | None:
        return self._by_uid.get(self._uid_of.get((namespace, name), ""))


def micros(seconds: float) -> int:
    return round(seconds * 1_000_000)
