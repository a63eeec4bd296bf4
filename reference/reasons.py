"""The pages of the reasons of rejections, and of Kubernetes Events."""

from collections.abc import Iterable

from headroom.contract.event_reasons import EventReason
from headroom.contract.reasons import Reason
from reference.markdown import code, head, sentence, table

_INTRO = """\
If Headroom rejects a node for a pod, the pod's condition and kube-scheduler's Event
`FailedScheduling` count the nodes by the messages below. `kubectl headroom why POD` adds the
numbers: which GPU is nearest, and how much memory is missing there.

The code identifies a reason in the debug API and in labels of metrics. A node is rejected for the
first reason that applies. The last column shows against which reasons preemption can help.

"""
_NOT_OFFERED = """\
## Nodes that kube-scheduler does not offer

`kubectl headroom why` and the debug API also count nodes that kube-scheduler does not offer to
Headroom, with the codes `cordoned`, `taint`, `selector` and `affinity`. To use such a node,
uncordon it, or change the pod's tolerations, nodeSelector or node affinity.
"""
#: The first reasons of two sections.
_FIRST_OF_NODE, _FIRST_OF_DEVICE = Reason.UNKNOWN_NODE, Reason.CONTRADICTORY_REPORT

_EVENTS = """\
Headroom writes Events about pods and nodes (`source: headroom`), which `kubectl describe` shows. To
list the Events of one reason, run `kubectl get events -A --field-selector reason=NoGPUFits`. Events
of decisions carry the annotation `headroom.gpu/decision`.

kube-scheduler's own Event `FailedScheduling` counts the nodes by [reason](reasons.md).

"""


def page() -> str:
    """Return docs/reference/reasons.md."""
    found = list(Reason)
    node, device = found.index(_FIRST_OF_NODE), found.index(_FIRST_OF_DEVICE)
    sections = {
        "The pod": found[:node],
        "The node": found[node:device],
        "GPUs of the node": found[device:],
    }
    columns = "code | message | meaning | what to do"
    return (
        head("Reasons of rejections", "headroom/contract/reasons.py")
        + _INTRO
        + "".join(f"## {name}\n\n{table(columns, _rows(part))}" for name, part in sections.items())
        + _NOT_OFFERED
    )


def _rows(reasons: Iterable[Reason]) -> Iterable[tuple[str, ...]]:
    for each in reasons:
        remedy = sentence(each.remedy) + (" Preemption can help." if each.evictable else "")
        yield code(each.code), each.sentence, each.meaning, remedy


def events_page() -> str:
    """Return docs/reference/events.md."""
    rows = [(code(each.value), each.on, each.when, each.repeated) for each in EventReason]
    return (
        head("Events", "headroom/contract/event_reasons.py")
        + _EVENTS
        + table("reason | on | when | repeated", rows)
    ).rstrip("\n") + "\n"
