"""Checks that faults of consoles and webhooks do not affect kube-scheduler's calls, and checks the
logs of Headroom's processes.

The check ignores how long responses take, because the time depends on the machine.
``benchmarks.apart`` measures it. To detect a call that waits for a hanging console or webhook, each
fault lasts until calls that began after it get a response (see ``faults``).

Like ``audit``, this module imports nothing from the product.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.audit import Finding

#: The verbs that kube-scheduler calls for every pod.
VERBS = ("filter", "bind")
#: Parts of error messages that have another cause. Filter spreads the retries of many pods, the API
#: server is slow, or another extender wrote the GPUNode first each time.
OTHER_CAUSES = {
    "filter": ("no node has enough free GPU memory",),
    "bind": ("the API server took longer than kube-scheduler waits", "gave up after "),
}


@dataclass(slots=True)
class Call:
    verb: str
    #: ``asked`` is the decoded request body, and ``answer`` the decoded body of a response with
    #: status 200.
    asked: Any = None
    answer: Any = None
    #: Whether the call has ended.
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
    """Yield a finding for each call during the faults that failed without another cause.

    A bind may fail for a reason that filter also reports, because another pod may have taken the
    memory first. A bind may also fail because of the pod's state. ``states`` returns the messages
    for a pod UID.
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
    """Yield a finding for each exception in the log of a process."""
    for line in log.splitlines():
        with contextlib.suppress(ValueError):  # The process was killed while it wrote the line.
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
