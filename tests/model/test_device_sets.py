"""Explores every order of events on a steered node whose pods get sets of devices, also without
each rule of ADR 0116.

Each scenario has three pods. The extender binds them in any order, the kubelet admits them in any
order, users delete them, their containers end, the agent reports, and agent and kubelet restart.
Every state is judged. A pod that the agent rejects is a problem too, unless the agent may have
forgotten in a restart that an earlier pod has ended.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from agent.steering import choice
from headroom.core.placement import device_plugin_model, fit
from headroom.core.placement.snapshot import Columns, Mask
from tests.builders import container, pod
from tests.model.device_sets import Amount, Choose, Container, Job, Node, World

pytestmark = pytest.mark.slow

log = logging.getLogger(__name__)

MOST_STATES = 50_000


class Fixed(Random):
    """Chooses the first possibility, because the explorer itself tries every order."""

    fresh = False

    def random(self) -> float:
        return 0.0 if self.fresh else 1.0

    def shuffle(self, x: Any) -> None:
        pass

    def sample(self, population: Any, k: int, *, counts: Any = None) -> list[Any]:
        return list(population)[:k]


def job(uid: str, *containers: Container) -> Job:
    vram = ",".join(
        f"{each.name}={each.amount[1]}{'Gi' if each.amount[0] == 'gib' else '%'}"
        for each in containers
    )
    inits = [container(each.name, each.devices) for each in containers if each.init]
    apps = [container(each.name, each.devices) for each in containers if not each.init]
    return Job(uid, containers, pod(vram, *apps, init=inits, uid=uid, name=uid))


def main(devices: int, amount: Amount) -> Container:
    return Container("main", devices, amount)


@dataclass(frozen=True)
class Play:
    node: Node
    jobs: tuple[Job, ...]


PLAYS: Mapping[str, Play] = {
    "two pods with two GPUs and one with one": Play(
        Node.of(3, 4),
        (
            job("p", main(2, ("gib", 14))),
            job("q", main(2, ("gib", 8))),
            job("r", main(1, ("gib", 12))),
        ),
    ),
    "a whole GPU, a tiny pod and two GPUs": Play(
        Node.of(3, 2),
        (
            job("whole", main(1, ("percent", 100))),
            job("tiny", main(1, ("gib", 1))),
            job("wide", main(2, ("gib", 20))),
        ),
    ),
    "an init container with fewer GPUs": Play(
        Node.of(3, 3),
        (
            job("p", Container("init", 1, ("gib", 10), init=True), main(2, ("gib", 10))),
            job("q", main(3, ("gib", 8))),
            job("r", main(1, ("gib", 16))),
        ),
    ),
}


@dataclass(frozen=True)
class Explored:
    states: int
    wrong: str = ""
    story: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n  ".join((f"{self.states} states", *self.story, self.wrong))


def explore(play: Play, choose: Choose = choice.choose) -> Explored:
    """Visit every state in order of distance, until a state has a problem."""
    start = World(play.node, Fixed(), choose=choose)
    seen, ahead = {key(start, ())}, deque([(start, (), ())])
    while ahead:
        world, bound, story = ahead.popleft()
        for name, after, bound_after in successors(world, play.jobs, bound):
            problems = after.problems()
            if after.counts["rejected"]:
                problems.append("the agent rejected a pod")
            if problems:
                return Explored(len(seen), "; ".join(problems), (*story, name))
            if (found := key(after, bound_after)) not in seen:
                seen.add(found)
                ahead.append((after, bound_after, (*story, name)))
        assert len(seen) <= MOST_STATES, f"more than {MOST_STATES} states"
    return Explored(len(seen))


def key(world: World, bound: Sequence[str]) -> bytes:
    """Identify the state. Equal states have equal keys."""
    # Checkpoint entries of pods that are gone are removed before the next allocation.
    return msgspec.json.encode(
        (
            {uid: sorted(job.held.items()) for uid, job in world.jobs.items()},
            sorted(world.bound),
            world.reservations,
            world.told,
            sorted(world.arrived),
            (world.forgetful, world.blind),
            bound,
        ),
        order="deterministic",
    )


def successors(
    world: World, jobs: Sequence[Job], bound: Sequence[str]
) -> Iterator[tuple[str, World, tuple[str, ...]]]:
    """Yield each possible step with the world after it, and the pods that have been bound."""

    def after(step: Callable[[World], object]) -> World:
        made = world.copy()
        step(made)
        return made

    same = tuple(bound)
    for each in jobs:
        if each.uid not in bound:
            made = world.copy()
            if made.bind(Job(each.uid, each.containers, each.pod)):
                yield f"{each.uid} is bound", made, (*sorted((*bound, each.uid)),)
    for uid in world.bound:
        for fresh in (False, True):
            made = world.copy()
            made.lots = lots = Fixed()
            lots.fresh = fresh
            made.admit(uid)
            yield f"{uid} is admitted", made, same
        yield f"{uid} is deleted", after(lambda made, uid=uid: deleted(made, uid)), same  # type: ignore[misc]
    for uid, each in world.jobs.items():
        if each.held:
            yield f"{uid} ends", after(lambda made, uid=uid: made.jobs.pop(uid)), same  # type: ignore[misc]
    yield "a report", after(World.report), same
    yield "reservations are removed", after(World.collect), same
    yield "the kubelet restarts", after(World.restart_kubelet), same
    yield "the agent restarts", after(World.restart_agent), same


def deleted(world: World, uid: str) -> None:
    world.bound.remove(uid)
    del world.jobs[uid]


@pytest.mark.parametrize("play", PLAYS)
def test_sets_hold_in_every_order_of_events(play: str) -> None:
    explored = explore(PLAYS[play])
    log.info("%s: %s", play, explored)
    assert not explored.wrong, explored
    assert explored.states > 1000


def choose_with(before: str, after: str) -> Choose:
    """Return the agent's choice with changed source code."""
    source = Path(str(choice.__file__)).read_text()
    assert source.count(before) == 1, before
    rewritten = ModuleType(choice.__name__)
    rewritten.__dict__["__name__"] = choice.__name__
    exec(compile(source.replace(before, after), "rewritten choice", "exec"), rewritten.__dict__)

    def choose(*arguments: Any) -> Any:
        found = rewritten.choose(*arguments)
        real = {each.__name__: each for each in (choice.Choice, choice.NoRoom, choice.OnlyCordoned)}
        return real[type(found).__name__](
            *(getattr(found, name) for name in type(found).__dataclass_fields__)
        )

    return choose


CHANGES = {
    "the reserved set is not preferred": (
        "                each.device not in reserved_devices,\n",
        "                each.device in reserved_devices,\n",
    ),
    "a device that the container holds is chosen again": (
        "not available or device.uuid in held:",
        "not available:",
    ),
    "several replicas are on the first device": (
        "        (*request.must_include, *(each.replica for each in best)),\n",
        "        (*request.must_include, *[r for r in sorted(request.available) if "
        "device_of(r) == best[0].device][:needed]),\n",
    ),
    "pods that have ended count as unconfirmed": (
        "        and uid not in ended\n",
        "",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_model_notices_a_changed_choice(change: str) -> None:
    explored = [explore(play, choose_with(*CHANGES[change])) for play in PLAYS.values()]
    log.info("%s: %s", change, [str(each) for each in explored])
    assert any(each.wrong for each in explored)


def usable_with_other_sets(ask: Any, columns: Columns, candidates: Mask) -> Mask:
    free = columns.replicas_free - columns.replicas_unconfirmed
    return np.asarray(candidates & (free >= ask.most_on_device))


def test_the_model_notices_that_two_sets_are_unconfirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "_usable", usable_with_other_sets)
    monkeypatch.setattr(device_plugin_model._Steered, "_is_open", lambda *_: True)
    explored = explore(PLAYS["two pods with two GPUs and one with one"])
    log.info("%s", explored)
    assert explored.wrong
