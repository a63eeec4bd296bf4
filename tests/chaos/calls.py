"""Checks that faults of only consoles and webhooks do not affect kube-scheduler's calls, and judges
the logs of Headroom's processes.

Judges responses but not their speed, which depends on the machine and is measured by
``benchmarks.apart``. A call that waits for a console or a webhook gets no response while that
process hangs, so a fault lasts until calls that began after it are answered (``faults``).

Like ``audit``, imports nothing from the product.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.audit import Finding

#: The verbs that the scheduling of every pod needs.
VERBS = ("filter", "bind")
#: Parts of errors with another cause: filter spreads the retries of many pods, the API server is
#: slow, or another extender always wrote the GPUNode first.
OTHER_CAUSES = {
    "filter": ("no node has enough free GPU memory",),
    "bind": ("the API server took longer than kube-scheduler waits", "gave up after "),
}


@dataclass(slots=True)
class Call:
    verb: str
    #: The decoded bodies of the request and of a response with status 200, or None.
    asked: Any = None
    answer: Any = None
    #: False while the call is in progress.
    ended: bool = False

    @property
    def error(self) -> str:
        return (self.answer.get("Error") or "") if isinstance(self.answer, dict) else ""

    @property
    def succeeded(self) -> bool:
        return self.answer is not None and not self.error


def noticed(
    before: Sequence[Call], during: Sequence[Call], states: Callable[[str], Sequence[str]]
) -> Iterator[Finding]:
    """Yield calls ``during`` the faults that failed without another cause.

    A bind may fail for a reason that filter gives as well, because another pod came first. It may
    also fail because of the state of the pod, for which ``states`` returns the texts by uid.
    """
    reasons = {
        why
        for call in (*before, *during)
        if call.verb == "filter" and call.answer
        for why in (call.answer.get("FailedAndUnresolvableNodes") or {}).values()
    }
    for call in during:
        if call.ended and call.answer is None:
            yield Finding("unanswered", call.verb, "ended without an answer with status 200")
        elif call.error and not _is_expected(call, reasons, states):
            yield Finding("error", call.verb, call.error)


def unexpected(process: str, log: str) -> Iterator[Finding]:
    """Yield the exceptions in the log of a process, which must not have any."""
    for line in log.splitlines():
        with contextlib.suppress(ValueError):  # The process was killed during the write.
            entry = json.loads(line)
            if isinstance(entry, dict) and "exception" in entry:
                what = f"{entry['event']}: {entry['exception'][-1000:]}"
                yield Finding("exception", process, what)


def _is_expected(call: Call, reasons: set[str], states: Callable[[str], Sequence[str]]) -> bool:
    if any(part in call.error for part in OTHER_CAUSES.get(call.verb, ())):
        return True
    if call.verb != "bind":
        return False
    pod = f"pod {call.asked['PodNamespace']}/{call.asked['PodName']} "
    words = tuple(pod + state for state in states(call.asked["PodUID"]))
    return call.error in reasons or call.error.startswith(words)
