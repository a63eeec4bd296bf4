"""Explores every order in which the calls of several actors can reach the server.

An actor is the real code, and that is deterministic: what it does next depends on nothing but the
answers it got so far. So an actor's state is the list of those answers, and to find its next call
it is run again from the start over a store that repeats them and stops at the first call that has
none. There are no threads, every state is a value, and equal states are explored once.

A step is one of
  * a call of one actor reaches the server and is answered;
  * a writing call is lost: its actor gets ``OutcomeUnknown`` at once, and the message
      arrives at any later time, or never (at most as often as the scenario allows);
  * such a message arrives;
  * an action of another client: a user, a kubelet, an administrator.

A crash needs no step of its own: an actor that is never chosen again has crashed, and every state
is judged. A message that is lost, or done and not answered, is one that never arrives, or arrives
at once.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from extender.errors import OutcomeUnknown, StoreError
from extender.ledger.memory_store import SyncStore
from tests.model.world import Call, Seam, World, again

#: The code of an actor, over the store that it gets.
Program = Callable[[SyncStore], object]
#: A single action of another client; None while it is not possible.
Deed = Callable[[World], World | None]
#: Errors of a world; empty if there are none.
Judge = Callable[[World], str]


@dataclass(frozen=True)
class Scenario:
    world: World
    actors: Mapping[str, Program]
    deeds: Mapping[str, Deed]
    #: How many writing calls may be lost from sight.
    losses: int = 0


@dataclass(frozen=True)
class Explored:
    """``wrong`` is empty, or what is wrong at the end of ``story``, the shortest to get there."""

    states: int
    steps: int
    worlds: int
    wrong: str = ""
    story: tuple[str, ...] = ()

    def __str__(self) -> str:
        told = "\n  ".join(("", *self.story, self.wrong)) if self.wrong else ""
        return f"{self.states} states, {self.steps} steps, {self.worlds} worlds{told}"


#: The mind of an actor that has nothing left to do.
_DONE = -1


@dataclass(frozen=True)
class _State:
    world: World
    #: For each actor the number of its list of answers (``_Actors``).
    minds: tuple[int, ...]
    under_way: tuple[Call, ...]
    deeds_left: tuple[str, ...]
    losses_left: int

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        under_way = tuple(sorted(call.key for call in self.under_way))
        return self.world.key, self.minds, under_way, self.deeds_left, self.losses_left


class _Actors:
    """Runs actors, and numbers the lists of answers that they have got."""

    def __init__(self, programs: list[Program]) -> None:
        self._programs = programs
        self._number_of: dict[tuple[int, bytes], int] = {}
        self._answers: list[tuple[Any, ...]] = [()]
        self._next: dict[tuple[int, int], Call | None] = {}

    def next_call(self, actor: int, mind: int) -> Call | None:
        """The next step of the actor; None if it is done."""
        if mind == _DONE:
            return None
        key = actor, mind
        if key not in self._next:
            self._next[key] = self._run(self._programs[actor], self._answers[mind])
        return self._next[key]

    def told(self, actor: int, mind: int, answer: Any) -> int:
        """The list of answers with one more; how an actor came to its end does not matter."""
        key = (
            mind,
            msgspec.json.encode(
                type(answer).__name__ if isinstance(answer, StoreError) else answer
            ),
        )
        if key not in self._number_of:
            self._number_of[key] = len(self._answers)
            self._answers.append((*self._answers[mind], answer))
        mind = self._number_of[key]
        return mind if self.next_call(actor, mind) else _DONE

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
    """Stops an actor at a call; no ``Exception``, so that no actor handles it."""

    def __init__(self, call: Call) -> None:
        self.call = call


def explore(scenario: Scenario, judge: Judge, most_states: int = 1_000_000) -> Explored:
    """Visit every state, nearest first, until one is wrong; too many of them is an error."""
    names, actors = list(scenario.actors), _Actors(list(scenario.actors.values()))
    start = _State(scenario.world, (0,) * len(names), (), tuple(scenario.deeds), scenario.losses)
    came_from: dict[tuple[Any, ...], tuple[_State, str] | None] = {start.key: None}
    judged: dict[bytes, str] = {}
    ahead, steps = deque([start]), 0
    while ahead:
        state = ahead.popleft()
        world = state.world
        if world.key not in judged:
            judged[world.key] = judge(world)
        if wrong := judged[world.key]:
            story = tuple(_story(state, came_from))
            return Explored(len(came_from), steps, len(judged), wrong, story)
        for message, after in _successors(state, names, actors, scenario):
            steps += 1
            if after.key not in came_from:
                came_from[after.key] = state, message
                ahead.append(after)
        assert len(came_from) <= most_states, f"more than {most_states} states"
    return Explored(len(came_from), steps, len(judged))


def _successors(
    state: _State, names: list[str], actors: _Actors, scenario: Scenario
) -> Iterator[tuple[str, _State]]:
    for i, mind in enumerate(state.minds):
        call = actors.next_call(i, mind)
        if call is None:
            continue
        world, answer = state.world.perform(call)
        message = f"{names[i]}: {call.operation}"
        yield (
            f"{message} -> {_short(answer)}",
            replace(state, world=world, minds=_with(state.minds, i, actors.told(i, mind, answer))),
        )
        if state.losses_left and call.writes:
            yield (
                f"{message}, lost from sight",
                replace(
                    state,
                    minds=_with(state.minds, i, actors.told(i, mind, OutcomeUnknown("no answer"))),
                    under_way=(*state.under_way, call),
                    losses_left=state.losses_left - 1,
                ),
            )
    for i, call in enumerate(state.under_way):
        world, answer = state.world.perform(call)
        under_way = state.under_way[:i] + state.under_way[i + 1 :]
        message = f"{call.operation} arrives -> {_short(answer)}"
        yield message, replace(state, world=world, under_way=under_way)
    for name in state.deeds_left:
        if (changed := scenario.deeds[name](state.world)) is not None:
            left = tuple(other for other in state.deeds_left if other != name)
            yield name, replace(state, world=changed, deeds_left=left)


def _with(minds: tuple[int, ...], i: int, mind: int) -> tuple[int, ...]:
    return (*minds[:i], mind, *minds[i + 1 :])


def _short(answer: Any) -> str:
    if isinstance(answer, StoreError):
        return type(answer).__name__
    metadata = getattr(answer, "metadata", None)
    return f"{metadata.name}@{metadata.resource_version}" if metadata else "done"


def _story(
    state: _State, came_from: Mapping[tuple[Any, ...], tuple[_State, str] | None]
) -> list[str]:
    story: list[str] = []
    while (origin := came_from[state.key]) is not None:
        state, message = origin
        story.append(message)
    return story[::-1]
