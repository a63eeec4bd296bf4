"""Tests that `log --follow` shows each change once, even if the connection to the console
is lost.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from headroom.kubectl.debug_api_client import BAD_INPUT, UNREACHABLE, CommandError
from headroom.kubectl.follow import Changes

LOST = CommandError("http://console does not answer: timed out; check --server", UNREACHABLE)
EXPIRED = CommandError("the token is not accepted", UNREACHABLE)
AGAIN = "; trying again every 2 s"


def change(id: str, at_s: float = 0.0, **fields: Any) -> list[str]:
    """Return the lines of a change at 12:00 plus ``at_s`` seconds."""
    at = f"2026-11-27T12:00:{at_s:06.3f}+00:00"
    names = ("node", "device", "namespace", "name", "uid", "decision_id", "cause", "message")
    body = {"id": id, "at": at, "snapshot_generation": 1, "kind": "report_lost"}
    body |= dict.fromkeys(names) | fields
    return [f"id: {id}", f"event: {body['kind']}", f"data: {json.dumps(body)}", ""]


SNAPSHOT = ["event: snapshot", "data: 4", ""]


class Console:
    """Answers each request with the next stream. A stream can end with an error."""

    def __init__(self, *answers: Sequence[str | CommandError]) -> None:
        self._answers = iter(answers)
        #: The Last-Event-ID and the parameter ``since`` of each request.
        self.asked: list[tuple[str, str | None]] = []

    def lines(self, path: str, last_event_id: str = "", *, since: str | None) -> Iterator[str]:
        assert path == "events"
        self.asked.append((last_event_id, since))
        for line in next(self._answers):
            if isinstance(line, CommandError):
                raise line
            yield line


class Ended(Exception):
    """There are no more streams."""


def follow(console: Console, answers: int, since: str | None = None) -> tuple[list[str], list[str]]:
    """Follow until all streams have ended. Return the IDs of the shown changes and the notes."""
    shown: list[str] = []
    notes: list[str] = []
    waits = 0

    def wait(seconds: float) -> None:
        nonlocal waits
        waits += 1
        if waits == answers:
            raise Ended

    api: Any = console
    changes = Changes(lambda: api, notes.append, wait).since(since)
    with pytest.raises(Ended):  # noqa: PT012 - shown must survive the exception
        for event in changes:
            shown.append(event["id"])  # noqa: PERF401
    return shown, notes


def test_a_new_snapshot_is_not_a_change() -> None:
    console = Console(["retry: 2000", "", *change("a.1"), *SNAPSHOT, *change("a.2", node="n")])
    assert follow(console, 1, "10m") == (
        ["a.1", "a.2"],
        [f"connection lost: the console ended the connection{AGAIN}"],
    )
    assert console.asked == [("", "10m")]


def test_after_a_lost_connection_the_same_console_continues_after_the_last_change() -> None:
    console = Console(
        [*change("a.1", 10.0), LOST],
        *[[LOST], [EXPIRED], [EXPIRED]],
        ["retry: 2000", *change("a.2", 11.0)],
    )
    lost, expired, ended = (
        f"connection lost: {each}{AGAIN}"
        for each in (LOST, EXPIRED, "the console ended the connection")
    )
    assert follow(console, 5) == (["a.1", "a.2"], [lost, expired, "connected again", ended])
    since = "2026-11-27T12:00:05+00:00"
    assert console.asked == [("", None), *[("a.1", since)] * 4]


def test_another_console_does_not_repeat_shown_changes() -> None:
    bound = {"kind": "decision", "decision_id": "u.1", "cause": "bound", "node": "n"}
    console = Console(
        [*change("a.1", 10.0, **bound), *change("a.2", 20.0, node="n")],
        [
            *change("b.1", 15.5, node="n"),  # This console noticed the change 4.5 s earlier.
            *change(
                "b.2", 31.0, **bound, message="again"
            ),  # The console published this change when it started.
            *change("b.3", 32.0, **bound | {"cause": "failed"}),
            *change("b.4", 40.0, node="n"),
            *change("b.5", 41.0, node="n"),
        ],
    )
    shown, notes = follow(console, 2)
    assert shown == ["a.1", "a.2", "b.3", "b.4", "b.5"]
    assert notes[1:3] == [
        "connected again",
        "another console answers: changes since 2026-11-27T12:00:20.000+00:00 can be missing, "
        "except decisions",
    ]
    assert console.asked[1] == ("a.2", "2026-11-27T12:00:15+00:00")


@pytest.mark.parametrize(
    ("streams", "code"),
    [
        pytest.param([[LOST]], UNREACHABLE, id="never connected"),
        pytest.param(
            [["retry: 2000"], [CommandError("bad since", BAD_INPUT)]], BAD_INPUT, id="bad request"
        ),
    ],
)
def test_a_permanent_error_is_raised(streams: Any, code: int) -> None:
    console: Any = Console(*streams)
    with pytest.raises(CommandError) as caught:
        list(Changes(lambda: console, lambda text: None, lambda s: None).since(None))
    assert caught.value.exit_code == code
