"""What an attempt to place a pod is called, by every replica and in every verb alike.

kube-scheduler shows the whole pod to filter, prioritize and preempt, and the Binding of bind is
conditional on the very resourceVersion: so the pod's uid and resourceVersion name the attempt, and
nothing has to be carried from one call to the next.
"""

import msgspec

from contract.annotations import PLACEMENT
from contract.kube import Pod


class _Placement(msgspec.Struct, frozen=True):
    decision: str = ""


_decode = msgspec.json.Decoder(_Placement).decode


#: Annotation of our Events on pods: the decision that they tell of, or that put the pod there.
DECISION = "headroom.gpu/decision"


def decision_id(uid: str, resource_version: str) -> str:
    return f"{uid}.{resource_version}"


def decision_of(pod: Pod) -> str:
    """The decision by which the pod is where it is, as its placement says; empty where none does.
    Raises nothing: users can write anything there."""
    text = pod.annotation(PLACEMENT)
    if text is None:
        return ""
    try:
        return _decode(text).decision
    except (ValueError, RecursionError):
        return ""
