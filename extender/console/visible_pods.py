"""Which pods the caller of a view may see: those that it may ``get`` at the API server."""

from collections.abc import Callable
from dataclasses import replace

from extender.state.suggestions import Suggestion

#: Returns whether the caller may see a pod, by namespace and name. It can block on the API server.
Sees = Callable[[str, str], bool]


def everything(namespace: str, name: str) -> bool:
    """Return True: the caller may see all pods."""
    return True


def unnamed(advice: Suggestion, sees: Sees) -> Suggestion:
    """Return the suggestion without the pod to wait for, if the caller may not see that pod."""
    held = advice.held
    if held is None or sees(held.namespace, held.name):
        return advice
    sentence = (
        f"wait for a pod on node {advice.node} that you may not read: when it ends there is room"
    )
    return replace(advice, sentence=sentence, held=None)
