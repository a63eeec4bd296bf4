"""Judges kube-scheduler's calls while consoles and webhooks fail: none of them may notice.

Pure, and imports nothing of ours, as ``audit``. The calls of the same site before the first fault
say what is usual there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.audit import Finding

#: Of the mean of all calls of a verb, to that before the faults. Floods take a share of the same
#: cores here, which is no more than that; to wait for any process that is paused is.
MOST_RATIO = 20.0
#: A mean below this says nothing: one pause of the machine makes it ten times as long.
LEAST_S = 0.05


@dataclass(frozen=True, slots=True)
class Call:
    verb: str
    took_s: float
    #: False: it was under way when the wires were asked.
    ended: bool
    #: With 200 and a whole body.
    answered: bool
    asked: Any
    answer: Any

    @property
    def error(self) -> str:
        return (self.answer.get("Error") or "") if isinstance(self.answer, dict) else ""


def noticed(
    before: Sequence[Call],
    during: Sequence[Call],
    timeout_s: float,
    has_settled: Callable[[str], bool],
) -> Iterator[Finding]:
    """What differs in the calls ``during`` the faults. ``has_settled`` says whether a pod is bound,
    or gone: then a bind of it fails rightly."""
    for call in during:
        if call.took_s >= timeout_s:
            yield Finding("late", call.verb, f"no answer within {timeout_s} s")
        elif call.ended and not call.answered:
            yield Finding("unanswered", call.verb, f"after {call.took_s:.2f} s: {call.answer}")
        elif call.error and not (call.verb == "bind" and has_settled(call.asked["PodUID"])):
            yield Finding("error", call.verb, call.error)
    for verb in {call.verb for call in during}:
        usual_s, found_s = _mean_s(before, verb), _mean_s(during, verb)
        if found_s > max(LEAST_S, MOST_RATIO * usual_s):
            what = f"{found_s:.3f} s on average, {usual_s:.3f} s before the faults"
            yield Finding("slow", verb, what)


def _mean_s(calls: Sequence[Call], verb: str) -> float:
    took_s = [call.took_s for call in calls if call.verb == verb]
    return sum(took_s) / max(1, len(took_s))
