"""The id of a scheduling attempt, which is the same in all verbs and all extender replicas.

kube-scheduler sends the whole pod to filter, prioritize and preempt, and the Binding that bind
creates is conditional on the pod's resourceVersion. So the pod's uid and resourceVersion identify
the attempt, and the calls need not pass any state to each other.
"""

import msgspec

from headroom.contract.annotations import PLACEMENT
from headroom.contract.kube import Pod


class _Placement(msgspec.Struct, frozen=True):
    decision: str = ""


_decode = msgspec.json.Decoder(_Placement).decode


def decision_id(uid: str, resource_version: str) -> str:
    return f"{uid}.{resource_version}"


def decision_of(pod: Pod) -> str:
    """Return the id of the decision that placed the pod, from its placement annotation.

    Return an empty string if the pod has no such annotation or it cannot be decoded, because users
    can write any text into it.
    """
    text = pod.annotation(PLACEMENT)
    if text is None:
        return ""
    try:
        return _decode(text).decision
    except (ValueError, RecursionError):
        return ""
