"""Tests that steering is turned on and off and that the agent is killed, upgraded and uninstalled
in each state of a node.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tests.kubelet.node_objects import RESOURCE
from tests.kubelet.steered_node import StartSteered, SteeredNode, start_steered

__all__ = ["start_steered"]

DEVICES, REPLICAS = 2, 12


@dataclass(frozen=True)
class State:
    """A state of a node, as docs/design/device-truth.md defines it in section "Steered"."""

    #: Whether the node's annotation requests steering.
    wanted: bool = False
    agent: str = "running"
    #: Whether a steering agent was killed and no agent has run since.
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
    """Yield a sequence of changes that covers each possible change in each reachable state."""
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
    """Return the shortest path that ends with a change that was not yet made in its state."""
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
    """Return whether an agent registered last, according to the logs of all the node's agents."""
    log = steered.node.log("agent")
    return log.rfind("steering_registered") > log.rfind("plugin_brought_back")


def check(steered: SteeredNode, state: State, number: int) -> None:
    """Check that the node reaches the documented state, and that the next pod gets the right
    device.
    """
    node = steered.node
    replicas = 0 if state.stranded else DEVICES * REPLICAS
    if state.agent == "running":
        wanted = [RESOURCE] if state.steers else []
        node.wait(lambda: steered.steered() == wanted, f"a report that fits {state}")
    if not state.steers and not state.stranded:
        folder = node.root / "device-plugins"
        node.wait(lambda: not list(folder.glob("headroom-*")), f"no trace in {state}")
        # Check the log, because the Node may not show yet that the kubelet has no replicas between
        # two registrations.
        node.wait(lambda: not given_to_agent(steered), f"the plugin in its place in {state}")
    node.wait(lambda: node.allocatable() == replicas, f"{replicas} replicas in {state}")
    if not replicas:
        return
    pods = [f"state-{number}", f"state-{number}-too"]
    if state.steers:
        # The plugin would alternate between the devices.
        assert [steered.place(pod, "GPU-1", gib=1) for pod in pods] == ["GPU-1", "GPU-1"]
    else:
        assert {steered.device(pod) for pod in pods} == {"GPU-0", "GPU-1"}
    uids = [node.uid(pod) for pod in pods]
    for pod in pods:
        node.delete(pod)
    node.wait(lambda: not node.held(), "that every replica is free")
    steered.forget(uids)


def test_every_change_from_every_state_leads_to_the_documented_state(
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
