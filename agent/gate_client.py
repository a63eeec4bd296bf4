"""The gate client of a pod, which waits until the agent of its node allows the pod to start.

It runs as the pod's first init container (docs/design/device-truth.md). Its exit status is 0 only
after the answer "yes", 2 if its environment is incomplete, and 143 if it was terminated. In all
other cases it waits and prints the reason: no agent answers, the agent cannot decide yet, or there
is not enough memory. It never gives up, because the kubelet would restart it with a backoff of
minutes.

Every gated pod waits for this process, so it imports only the standard library and starts quickly.
"""

import http.client
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

PORT = "9410"
#: Timeout of one request in seconds.
TIMEOUT_S = 10.0
#: Shortest and longest wait between two requests in seconds. The first wait is the shortest.
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 3.0
#: An unchanged answer is printed again after this many seconds.
REPEAT_S = 60.0
#: Maximum size of a response in bytes. Agents send smaller responses.
_MOST_BYTES = 1 << 16
_MOST_REASON_CHARS = 500

USAGE_STATUS = 2
ENDED_STATUS = 128 + signal.SIGTERM

_EXAMPLE = """in the manifest of the init container, write:
  env:
  - {name: POD_UID, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}
  - {name: HOST_IP, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}
"""


class BadEnvironment(Exception):
    """The environment is incomplete. The message states what is missing and how to set it."""


@dataclass(frozen=True, slots=True)
class Question:
    """The waiting pod, and the address of the agent on its node."""

    uid: str
    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Answer:
    #: Whether the pod may start.
    yes: bool
    #: One line for the log of the container.
    text: str


def read_question(env: Mapping[str, str]) -> Question:
    """Read the environment of the init container. Raises ``BadEnvironment``."""
    for name in ("POD_UID", "HOST_IP"):
        if not env.get(name):
            raise BadEnvironment(f"{name} is not set; {_EXAMPLE}")
    # The variable cannot be HEADROOM_AGENT_PORT, because the kubelet sets that variable if the
    # namespace has a Service headroom-agent.
    port = env.get("HEADROOM_AGENT_PORT_NUMBER", PORT)
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise BadEnvironment(
            f"HEADROOM_AGENT_PORT_NUMBER {port!r} is not a port. Example: {PORT}\n"
        )
    return Question(env["POD_UID"], env["HOST_IP"], int(port))


def ask(question: Question, timeout_s: float = TIMEOUT_S) -> Answer:
    """Send one request and return the answer. If the request fails, the answer is not yes."""
    connection = http.client.HTTPConnection(question.host, question.port, timeout=timeout_s)
    try:
        connection.request("GET", f"/v1/gate?pod_uid={quote(question.uid, safe='')}")
        response = connection.getresponse()
        body = response.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException) as err:
        why = str(err) or type(err).__name__
        return Answer(False, f"waiting: no agent answers at {question.url}: {why}")
    finally:
        connection.close()
    return _read(response.status, body, question)


def _read(status: int, body: bytes, question: Question) -> Answer:
    """Parse a response. The pod may start only if the status is 200 and the answer is "yes",
    because another server may listen at the agent's address."""
    try:
        verdict = json.loads(body)
        answer = verdict.get("answer")
        reason = _line(verdict.get("reason") or verdict.get("error"))
    except (ValueError, AttributeError, RecursionError):
        answer, reason = None, None
    if status == 200 and answer == "yes":
        return Answer(True, "yes: every GPU of this pod has enough free memory")
    if answer == "no":
        return Answer(False, f"no: {reason}; waiting for free memory, or for eviction of this pod")
    if answer == "not yet":
        return Answer(False, f"waiting: {reason}")
    if reason:
        return Answer(False, f"waiting: the agent at {question.url} answers {status}: {reason}")
    return Answer(False, f"waiting: {question.url} is not an agent: it answers {status}")


def _line(reason: object) -> str:
    """Return the reason as one printable line, or an empty string if there is no reason."""
    text = reason if isinstance(reason, str) else ""
    line = " ".join(text.split())[:_MOST_REASON_CHARS]
    return "".join(each if each.isprintable() else "?" for each in line)


def wait(
    question: Question,
    report: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
    jitter: Callable[[], float] = random.random,
) -> None:
    """Ask until the answer is yes.

    An answer is reported if its text is new, and again every ``REPEAT_S`` seconds. ``jitter``
    returns a random number in 0..1.
    """
    began_s = monotonic()
    wait_s = FIRST_WAIT_S
    printed, printed_at_s = "", 0.0
    while True:
        answer = ask(question)
        now_s = monotonic()
        if answer.yes:
            report(f"{answer.text} (asked for {now_s - began_s:.1f} s)")
            return
        if answer.text != printed or now_s - printed_at_s >= REPEAT_S:
            report(answer.text)
            # Ask more often after a change, because most pods wait only for the agent's next
            # report.
            wait_s = FIRST_WAIT_S if answer.text != printed else wait_s
            printed, printed_at_s = answer.text, now_s
        sleep(wait_s * (0.5 + jitter()))
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def main() -> int:
    def report(line: str) -> None:
        sys.stdout.write(f"headroom gate: {line}\n")
        sys.stdout.flush()

    def end(*_: object) -> None:
        # A container's first process ignores SIGTERM unless it installs a handler.
        sys.exit(ENDED_STATUS)

    signal.signal(signal.SIGTERM, end)
    try:
        question = read_question(os.environ)
    except BadEnvironment as err:
        report(str(err))
        return USAGE_STATUS
    wait(question, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
