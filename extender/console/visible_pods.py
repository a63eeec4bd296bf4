"""Which pods the caller of a view may see: those that the API server would show."""

from collections.abc import Callable
from dataclasses import replace

from extender.state.suggestions import Suggestion

#: Whether the caller may see a pod, by its namespace and name. May ask the API server: for threads.
Sees = Callable[[str, str], bool]


def everything(namespace: str, name: str) -> bool:
    return True


def unnamed(advice: Suggestion, sees: Sees) -> Suggestion:
    """The advice without the pod to wait for, if the caller may not see that pod."""
    held = advice.held
    if held is None or sees(held.namespace, held.name):
        return advice
    sentence = (
        f"wait for a pod on node {advice.node} that you may not read: when it ends there is room"
    )
    return replace(advice, sentence=sentence, held=None)
