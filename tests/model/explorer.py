"""Explores every order in which the calls of several actors can reach the server.

An actor runs the real code, which is deterministic, so its next action depends only on the
responses so far. Therefore an actor's state is the list of these responses. To find its next call,
the explorer runs the actor again from the start, on a store that repeats the responses and stops at
the first call without a response. There are no threads, every state is a value, and equal states
are explored only once.

A step is one of the following:
  * a call of an actor reaches the server and gets a response;
  * a writing call is lost: its actor gets ``OutcomeUnknown`` at once, and the message
      arrives at any later time, or never (at most as often as the scenario allows);
  * a lost message arrives;
  * an action of another client: a user, a kubelet, an administrator.

A crash needs no separate step. An actor that never takes another step has crashed, and every state
is checked. A lost request is a message that never arrives. A lost response is a message that
arrives immediately.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec

from extender.ledger.embedded_store import SyncStore
from headroom.errors import OutcomeUnknown, StoreError
from tests.model.world import Call, Seam, World, again

#: The code of an actor. Its argument is the store.
Program = Callable[[SyncStore], object]
#: An action of another client. Returns the next world, or None while the action is impossible.
Deed = Callable[[World], World | None]
#: Returns the errors in a world, or an empty string.
Judge = Callable[[World], str]
T = TypeVar("T", World, Call)


@dataclass(frozen=True)
class Scenario:
    world: World
    actors: Mapping[str, Program]
    deeds: Mapping[str, Deed]
    #: Maximum number of writing calls whose response is lost.
    losses: int = 0


@dataclass(frozen=True)
class Explored:
    """The result of an exploration. ``wrong`` describes the errors at the end of ``story``, which
    is the shortest sequence of steps that leads to an error.
    """

    states: int
    steps: int
    worlds: int
    wrong: str = ""
    story: tuple[str, ...] = ()

    def __str__(self) -> str:
        told = "\n  ".join(("", *self.story, self.wrong)) if self.wrong else ""
        return f"{self.states} states, {self.steps} steps, {self.worlds} worlds{told}"


#: The state number of an actor that has finished.
_DONE = -1


class _State(NamedTuple):
    #: Number of the world in ``_Server``.
    world: int
    #: The number of each actor's list of responses in ``_Actors``.
    minds: tuple[int, ...]
    #: Numbers of the calls that may still arrive, in ascending order.
    under_way: tuple[int, ...]
    deeds_left: tuple[str, ...]
    losses_left: int


class _Answer(NamedTuple):
    given: Any
    #: Identifies the response. Equal responses have equal keys.
    key: bytes
    #: A short form of the response for the story.
    text: str


def _answer(given: Any) -> _Answer:
    if isinstance(given, StoreError):
        name = type(given).__name__
        return _Answer(given, msgspec.json.encode(name), name)
    metadata = getattr(given, "metadata", None)
    text = f"{metadata.name}@{metadata.resource_version}" if metadata else "done"
    return _Answer(given, msgspec.json.encode(given), text)


_LOST = _answer(OutcomeUnknown("no answer"))


class _Server:
    """Numbers worlds and calls, and performs each call in each world only once."""

    def __init__(self) -> None:
        self.worlds: list[World] = []
        self.calls: list[Call] = []
        self._number_of: dict[bytes, int] = {}
        self._performed: dict[tuple[int, int], tuple[int, _Answer]] = {}

    def world(self, world: World) -> int:
        return self._number(world, self.worlds)

    def call(self, call: Call) -> int:
        return self._number(call, self.calls)

    def _number(self, what: T, of: list[T]) -> int:
        number = self._number_of.setdefault(what.key, len(of))
        if number == len(of):
            of.append(what)
        return number

    def perform(self, world: int, call: int) -> tuple[int, _Answer]:
        """Return the number of the world after the call, and the call's response."""
        key = world, call
        if key not in self._performed:
            after, answer = self.worlds[world].perform(self.calls[call])
            self._performed[key] = self.world(after), _answer(answer)
        return self._performed[key]


class _Actors:
    """Runs actors and numbers their lists of responses."""

    def __init__(self, programs: list[Program], server: _Server) -> None:
        self._programs = programs
        self._server = server
        self._number_of: dict[tuple[int, bytes], int] = {}
        self._answers: list[tuple[Any, ...]] = [()]
        self._next: dict[tuple[int, int], int | None] = {}

    def next_call(self, actor: int, mind: int) -> int | None:
        """Return the number of the actor's next call, or None if it has finished."""
        if mind == _DONE:
            return None
        key = actor, mind
        if key not in self._next:
            call = self._run(self._programs[actor], self._answers[mind])
            self._next[key] = None if call is None else self._server.call(call)
        return self._next[key]

    def told(self, actor: int, mind: int, answer: _Answer) -> int:
        """Return the number of the actor's list of responses after another response. All finished
        actors have the same number, because the rest of the exploration does not depend on their
        responses.
        """
        key = mind, answer.key
        if key not in self._number_of:
            self._number_of[key] = len(self._answers)
            self._answers.append((*self._answers[mind], answer.given))
        mind = self._number_of[key]
        return _DONE if self.next_call(actor, mind) is None else mind

    def _run(self, program: Program, answers: tuple[Any, ...]) -> Call | None:
        repeated = iter(answers)

        def answer(call: Call) -> Any:
            for known in repeated:
                return again(known)
            raise _Waits(call)

        try:
            program(Seam(answer))
        except _Waits as waits:
            return waits.call
        except StoreError:
            pass
        return None


class _Waits(BaseException):
    """Stops an actor at a call. It is not an ``Exception``, so that actors do not handle it."""

    def __init__(self, call: Call) -> None:
        self.call = call


def explore(scenario: Scenario, judge: Judge, most_states: int = 1_000_000) -> Explored:
    """Visit every state in order of distance until a state has errors. Fail if there are more than
    ``most_states`` states.
    """
    server = _Server()
    names, actors = list(scenario.actors), _Actors(list(scenario.actors.values()), server)
    world = server.world(scenario.world)
    start = _State(world, (0,) * len(names), (), tuple(scenario.deeds), scenario.losses)
    came_from: dict[_State, tuple[_State, str] | None] = {start: None}
    judged: dict[int, str] = {}
    ahead, steps = deque([start]), 0
    while ahead:
        state = ahead.popleft()
        if state.world not in judged:
            judged[state.world] = judge(server.worlds[state.world])
        if wrong := judged[state.world]:
            story = tuple(_story(state, came_from))
            return Explored(len(came_from), steps, len(judged), wrong, story)
        for message, after in _successors(state, names, actors, server, scenario):
            steps += 1
            if after not in came_from:
                came_from[after] = state, message
                ahead.append(after)
        assert len(came_from) <= most_states, f"more than {most_states} states"
    return Explored(len(came_from), steps, len(judged))


def _successors(
    state: _State, names: list[str], actors: _Actors, server: _Server, scenario: Scenario
) -> Iterator[tuple[str, _State]]:
    at, minds, under_way, deeds_left, losses_left = state
    for i, mind in enumerate(minds):
        number = actors.next_call(i, mind)
        if number is None:
            continue
        world, answer = server.perform(at, number)
        call = server.calls[number]
        message = f"{names[i]}: {call.operation}"
        told = _with(minds, i, actors.told(i, mind, answer))
        yield (
            f"{message} -> {answer.text}",
            _State(world, told, under_way, deeds_left, losses_left),
        )
        if losses_left and call.writes:
            told = _with(minds, i, actors.told(i, mind, _LOST))
            lost = tuple(sorted((*under_way, number)))
            yield (
                f"{message}, lost from sight",
                _State(at, told, lost, deeds_left, losses_left - 1),
            )
    for i, number in enumerate(under_way):
        world, answer = server.perform(at, number)
        message = f"{server.calls[number].operation} arrives -> {answer.text}"
        rest = under_way[:i] + under_way[i + 1 :]
        yield message, _State(world, minds, rest, deeds_left, losses_left)
    for name in deeds_left:
        if (changed := scenario.deeds[name](server.worlds[at])) is not None:
            left = tuple(other for other in deeds_left if other != name)
            yield name, _State(server.world(changed), minds, under_way, left, losses_left)


def _with(minds: tuple[int, ...], i: int, mind: int) -> tuple[int, ...]:
    return (*minds[:i], mind, *minds[i + 1 :])


def _story(state: _State, came_from: Mapping[_State, tuple[_State, str] | None]) -> list[str]:
    story: list[str] = []
    while (origin := came_from[state]) is not None:
        state, message = origin
        story.append(message)
    return story[::-1]
