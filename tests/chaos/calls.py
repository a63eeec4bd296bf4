"""Judges kube-scheduler's calls while consoles and webhooks fail: none of them may notice.

Pure, and imports nothing of ours, as ``audit``. The calls of the same site before the first fault
show what is usual there.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.audit import Finding

#: Mean of all calls of a verb, relative to that before the faults. Floods take a share of the same
#: cores here, which is no more than that; to wait for any process that is paused is.
MOST_RATIO = 20.0
#: A mean below this is not significant: one pause of the machine makes it ten times as long.
LEAST_S = 0.1
#: Share of all calls: the API server itself delays a bind by seconds on a busy machine.
MOST_LATE = 0.05
TOOK_LONGER = "the API server took longer than kube-scheduler waits"
#: In the error by which filter puts off a pod of many that wait.
TRY_AGAIN = "no node has enough free GPU memory; many pods wait"


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

    @property
    def rejections(self) -> Collection[str]:
        """The reasons against the nodes that a filter call rejected."""
        if self.verb != "filter" or not self.answered:
            return ()
        refused: dict[str, str] = self.answer.get("FailedAndUnresolvableNodes") or {}
        return refused.values()


def noticed(
    before: Sequence[Call],
    during: Sequence[Call],
    timeout_s: float,
    fates: Callable[[str], Sequence[str]],
) -> Iterator[Finding]:
    """Yield the differences between the calls ``before`` and ``during`` the faults.

    A bind may fail for a reason for which filter rejects nodes, because another pod can come first,
    and for a state of the pod at the API server: ``fates`` returns the texts that may follow the
    pod's name."""
    rejections = {why for call in (*before, *during) for why in call.rejections}
    late = [call for call in during if call.took_s > 0.9 * timeout_s or TOOK_LONGER in call.error]
    if len(late) > MOST_LATE * len(during):
        yield Finding("late", "calls", f"{len(late)} of {len(during)} had no answer in time")
    for call in during:
        if call in late:
            continue
        if call.ended and not call.answered:
            yield Finding("unanswered", call.verb, f"broke off after {call.took_s:.2f} s")
        elif call.error and not _is_right(call, rejections, fates):
            yield Finding("error", call.verb, call.error)
    for verb in {call.verb for call in during}:
        usual_s, found_s = _mean_s(before, verb), _mean_s(during, verb)
        if found_s > max(LEAST_S, MOST_RATIO * usual_s):
            what = f"{found_s:.3f} s on average, {usual_s:.3f} s before the faults"
            yield Finding("slow", verb, what)


def told(calls: Sequence[Call]) -> dict[str, str]:
    """Each verb's, for people."""
    counted = Counter(call.verb for call in calls)
    return {
        verb: f"{count} calls, {1e3 * _mean_s(calls, verb):.0f} ms on average, the longest "
        f"{max(1e3 * call.took_s for call in calls if call.verb == verb):.0f}"
        for verb, count in sorted(counted.items())
    }


def _is_right(
    call: Call, rejections: Collection[str], fates: Callable[[str], Sequence[str]]
) -> bool:
    if call.verb != "bind":
        return TRY_AGAIN in call.error
    pod = f"pod {call.asked['PodNamespace']}/{call.asked['PodName']} "
    words = tuple(pod + fate for fate in fates(call.asked["PodUID"]))
    return call.error in rejections or call.error.startswith(words)


def _mean_s(calls: Sequence[Call], verb: str) -> float:
    took_s = [call.took_s for call in calls if call.verb == verb]
    return sum(took_s) / max(1, len(took_s))
