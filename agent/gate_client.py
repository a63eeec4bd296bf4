"""The gate of a pod: waits until the agent of its node says that the pod may start.

Run as the pod's first init container (docs/device-truth.md). Its exit status is 0 only after a
yes; 2 where it was not told what to ask; 143 where it was ended. Whatever else happens it waits,
and says why: no agent answers, the agent does not know yet, there is no room. It never gives up by
itself, because the kubelet would start it anew with a back-off of minutes.

It imports nothing but what Python brings along, and starts quickly: every gated pod waits for it.
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
#: Seconds for one question.
TIMEOUT_S = 10.0
#: Seconds until the next question: at first, and at most.
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 3.0
#: Seconds after which it says the same again.
REPEAT_S = 60.0
#: Larger than any answer of an agent.
_MOST_BYTES = 1 << 16
_MOST_REASON = 500

USAGE_STATUS = 2
ENDED_STATUS = 128 + signal.SIGTERM

_RIGHT = """right is, in the manifest of the init container:
  env:
  - {name: POD_UID, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}
  - {name: HOST_IP, valueFrom: {fieldRef: {fieldPath: status.hostIP}}}
"""


class BadEnvironment(Exception):
    """The text says what is wrong and what is right."""


@dataclass(frozen=True, slots=True)
class Question:
    uid: str
    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Answer:
    yes: bool
    #: One line for whoever reads the log of the container.
    text: str


def read_question(env: Mapping[str, str]) -> Question:
    for name in ("POD_UID", "HOST_IP"):
        if not env.get(name):
            raise BadEnvironment(f"{name} is not set; {_RIGHT}")
    port = env.get("HEADROOM_AGENT_PORT", PORT)
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise BadEnvironment(f"HEADROOM_AGENT_PORT {port!r} is no port; right is, e.g., {PORT}\n")
    return Question(env["POD_UID"], env["HOST_IP"], int(port))


def ask(question: Question, timeout_s: float = TIMEOUT_S) -> Answer:
    """Ask once. Raises nothing: no answer is no yes."""
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
    """Whoever listens there in the agent's stead does not say yes by chance."""
    try:
        told = json.loads(body)
        answer, reason = told.get("answer"), _line(told.get("reason") or told.get("error"))
    except (ValueError, AttributeError, RecursionError):
        answer, reason = None, None
    if status == 200 and answer == "yes":
        return Answer(True, "yes: every GPU of this pod has room for it")
    if answer == "no":
        return Answer(False, f"no: {reason}; waiting to be placed elsewhere, or for room")
    if answer == "not yet":
        return Answer(False, f"waiting: {reason}")
    if reason:
        return Answer(False, f"waiting: the agent at {question.url} answers {status}: {reason}")
    return Answer(False, f"waiting: what answers at {question.url} is no agent: status {status}")


def _line(reason: object) -> str:
    """A reason that can be printed on one line; empty where there is none."""
    text = reason if isinstance(reason, str) else ""
    return " ".join(text.encode("utf-8", "replace").decode().split())[:_MOST_REASON]


def wait(
    question: Question,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
    lot: Callable[[], float] = random.random,
) -> None:
    """Return when the answer was yes."""
    began_s = monotonic()
    wait_s = FIRST_WAIT_S
    said, said_at_s = "", 0.0
    while True:
        answer = ask(question)
        now_s = monotonic()
        if answer.yes:
            say(f"{answer.text} (asked for {now_s - began_s:.1f} s)")
            return
        if answer.text != said or now_s - said_at_s >= REPEAT_S:
            say(answer.text)
            # What changes is worth a closer look: pods mostly wait for a report that is on its way.
            wait_s = FIRST_WAIT_S if answer.text != said else wait_s
            said, said_at_s = answer.text, now_s
        sleep(wait_s * (0.5 + lot()))
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def main() -> int:
    def say(line: str) -> None:
        sys.stdout.write(f"headroom gate: {line}\n")
        sys.stdout.flush()

    def end(*_: object) -> None:
        # As the first process of its container it would otherwise not heed the signal at all.
        sys.exit(ENDED_STATUS)

    signal.signal(signal.SIGTERM, end)
    try:
        question = read_question(os.environ)
    except BadEnvironment as err:
        say(str(err))
        return USAGE_STATUS
    wait(question, say)
    return 0


if __name__ == "__main__":
    sys.exit(main())
