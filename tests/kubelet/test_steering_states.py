"""Steering turned on and off, killed, upgraded and uninstalled, each from each state of a node."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tests.kubelet.node_objects import RESOURCE
from tests.kubelet.steered_node import StartSteered, SteeredNode, start_steered

__all__ = ["start_steered"]

DEVICES, REPLICAS = 2, 12


@dataclass(frozen=True)
class State:
    """The documentation of a node's states: docs/design/device-truth.md, "Steered"."""

    #: Whether the node asks to be steered.
    wanted: bool = False
    agent: str = "running"
    #: An agent was killed that steered, and none has run since.
    stranded: bool = False

    @property
    def steers(self) -> bool:
        return self.wanted and self.agent == "running"


def turned(state: State, on: bool) -> State:
    return replace(state, wanted=on)


def killed(state: State) -> State:
    if state.agent != "running":
        return state
    return replace(state, agent="killed", stranded=state.steers)


def uninstalled(state: State) -> State:
    return replace(state, agent="ended") if state.agent == "running" else state


CHANGES: dict[str, Callable[[State], State]] = {
    "on": lambda state: turned(state, True),
    "off": lambda state: turned(state, False),
    "killed": killed,
    "upgraded": lambda state: replace(state, agent="running", stranded=False),
    "uninstalled": uninstalled,
}


def walk(state: State) -> Iterator[str]:
    """Changes that lead from each state that can be reached through each change, one at least."""
    done: set[tuple[State, str]] = set()
    while True:
        way = _nearest(state, done)
        if way is None:
            return
        for change in way:
            done.add((state, change))
            state = CHANGES[change](state)
            yield change


def _nearest(start: State, done: set[tuple[State, str]]) -> tuple[str, ...] | None:
    """The shortest way to a pair of state and change that is not done, and through it."""
    ways: deque[tuple[State, tuple[str, ...]]] = deque([(start, ())])
    seen = {start}
    while ways:
        state, way = ways.popleft()
        for change, go in CHANGES.items():
            if (state, change) not in done:
                return (*way, change)
            if (after := go(state)) not in seen:
                seen.add(after)
                ways.append((after, (*way, change)))
    return None


def play(steered: SteeredNode, change: str, before: State) -> None:
    node = steered.node
    match change:
        case "on" | "off":
            steered.choose("steered" if change == "on" else "predicted")
        case "killed" if before.agent == "running":
            node.kill("agent")
        case "uninstalled" | "upgraded" if before.agent == "running":
            node._processes["agent"].terminate()
            node.end("agent")
    if change == "upgraded":
        seen = steered.observed_at()
        steered.start_agent("--device-choice=predicted")
        node.wait(lambda: steered.observed_at() != seen, "a report of the new agent")


def given_to_agent(steered: SteeredNode) -> bool:
    """Whether an agent registered last, by what all agents of the node have logged."""
    log = steered.node.log("agent")
    return log.rfind("steering_registered") > log.rfind("plugin_brought_back")


def check(steered: SteeredNode, state: State, number: int) -> None:
    """The node ends as documented, and the next pod gets the device that it should get."""
    node = steered.node
    replicas = 0 if state.stranded else DEVICES * REPLICAS
    if state.agent == "running":
        wanted = [RESOURCE] if state.steers else []
        node.wait(lambda: steered.steered() == wanted, f"a report that fits {state}")
    if not state.steers and not state.stranded:
        folder = node.root / "device-plugins"
        node.wait(lambda: not list(folder.glob("headroom-*")), f"no trace in {state}")
        # Between the two the kubelet has no replicas, which the Node may not show yet.
        node.wait(lambda: not given_to_agent(steered), f"the plugin in its place in {state}")
    node.wait(lambda: node.allocatable() == replicas, f"{replicas} replicas in {state}")
    if not replicas:
        return
    pods = [f"state-{number}", f"state-{number}-too"]
    if state.steers:
        # The plugin would take the devices in turn.
        assert [steered.place(pod, "GPU-1", gib=1) for pod in pods] == ["GPU-1", "GPU-1"]
    else:
        assert {steered.device(pod) for pod in pods} == {"GPU-0", "GPU-1"}
    uids = [node.uid(pod) for pod in pods]
    for pod in pods:
        node.delete(pod)
    node.wait(lambda: not node.held(), "that every replica is free")
    steered.forget(uids)


def test_every_change_leads_from_every_state_to_the_one_that_is_documented(
    start_steered: StartSteered,
) -> None:
    steered = start_steered(DEVICES, REPLICAS, flags=("--device-choice=predicted",))
    steered.node.wait(steered.observed_at, "a report")
    state = State()
    check(steered, state, 0)
    for number, change in enumerate(walk(state), 1):
        after = CHANGES[change](state)
        play(steered, change, state)
        if after != state or change == "upgraded":
            check(steered, after, number)
        state = after
