"""Judges kube-scheduler's calls while only consoles and webhooks have faults: none may be affected.
Also judges the logs of Headroom's processes.

Imports nothing of the product, like ``audit``.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.audit import Finding

#: Share of calls that may time out: on a busy machine the API server itself delays a bind.
MAX_LATE = 0.05
#: How much longer calls of a verb may take on average than before the faults, because floods use
#: the same cores here; and a mean below which the ratio means nothing.
MAX_RATIO, MIN_S = 20.0, 0.1
TOOK_LONGER = "the API server took longer than kube-scheduler waits"
#: Part of filter's error when it spreads the retries of many pods.
MANY_WAIT = "no node has enough free GPU memory"


@dataclass(slots=True)
class Call:
    verb: str
    #: The decoded bodies of the request and of an answer with status 200; None: no such answer.
    asked: Any = None
    answer: Any = None
    took_s: float = 0.0
    #: False: still in progress.
    ended: bool = False

    @property
    def error(self) -> str:
        return (self.answer.get("Error") or "") if isinstance(self.answer, dict) else ""


def noticed(
    before: Sequence[Call],
    during: Sequence[Call],
    timeout_s: float,
    states: Callable[[str], Sequence[str]],
) -> Iterator[Finding]:
    """Yield calls ``during`` the faults that failed without another cause.

    A bind may fail for a reason that filter gives as well, because another pod came first. It may
    also fail because of the state of the pod: ``states`` returns the words for a uid.
    """
    reasons = {
        why
        for call in (*before, *during)
        if call.verb == "filter" and call.answer
        for why in (call.answer.get("FailedAndUnresolvableNodes") or {}).values()
    }
    late = [call for call in during if call.took_s > 0.9 * timeout_s or TOOK_LONGER in call.error]
    if len(late) > MAX_LATE * len(during):
        yield Finding("late", "calls", f"{len(late)} of {len(during)} had no answer in time")
    for call in during:
        if call in late:
            continue
        if call.ended and call.answer is None:
            yield Finding("unanswered", call.verb, f"aborted after {call.took_s:.2f} s")
        elif call.error and not _is_expected(call, reasons, states):
            yield Finding("error", call.verb, call.error)
    for verb in {call.verb for call in during}:
        usual_s, found_s = _mean_s(before, verb), _mean_s(during, verb)
        if found_s > max(MIN_S, MAX_RATIO * usual_s):
            what = f"{found_s:.3f} s on average, {usual_s:.3f} s before the faults"
            yield Finding("slow", verb, what)


def unexpected(process: str, log: str) -> Iterator[Finding]:
    """Yield the exceptions in the log of a process: where it logs one, none may arrive."""
    for line in log.splitlines():
        with contextlib.suppress(ValueError):  # it was killed while it wrote
            entry = json.loads(line)
            if isinstance(entry, dict) and "exception" in entry:
                what = f"{entry['event']}: {entry['exception'][-1000:]}"
                yield Finding("exception", process, what)


def _mean_s(calls: Sequence[Call], verb: str) -> float:
    took_s = [call.took_s for call in calls if call.verb == verb]
    return sum(took_s) / max(1, len(took_s))


def _is_expected(call: Call, reasons: set[str], states: Callable[[str], Sequence[str]]) -> bool:
    if call.verb != "bind":
        return MANY_WAIT in call.error
    pod = f"pod {call.asked['PodNamespace']}/{call.asked['PodName']} "
    words = tuple(pod + state for state in states(call.asked["PodUID"]))
    return call.error in reasons or call.error.startswith(words)
