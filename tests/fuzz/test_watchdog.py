"""The judge of hostile inputs detects each kind of harm."""

import re
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import msgspec
import pytest
import structlog

from headroom.console.facts.gpu_pods import GpuPods
from headroom.contract.gpunode import GPUNodeSpec
from headroom.contract.gpunode_json import decode_gpunode
from headroom.contract.watched import GPUNodeSeen, NodeSeen
from headroom.core.cluster.changes import Event
from tests.builders import GIB, kube_node, reservation
from tests.fuzz import watch, watchdog
from tests.fuzz.samples import BAD, OBJECTS
from tests.fuzz.verbs import VerbTarget
from tests.fuzz.watch import WatchTarget
from tests.fuzz.watchdog import Tally, Target, attacked
from tests.fuzz.world import NODES, World
from tests.state.validation import violations
from tests.waiting import PATIENCE_S


class Planted(Target):
    """A target with one scripted reaction."""

    name = "planted"
    seeds = (b"x",)

    def __init__(self, does: Callable[[], object]) -> None:
        self._does = does

    def take(self, data: bytes) -> bool:
        self._does()
        return True


@pytest.fixture(autouse=True)
def valid_states() -> Iterator[None]:
    """Expect violations: these tests break the state on purpose."""
    yield
    violations()


def fed(does: Callable[[], object], inputs: int = 1) -> Tally:
    return attacked(lambda: Planted(does), range(inputs), 1)


def spin() -> None:
    while True:
        pass


def swallow_all() -> None:
    try:
        spin()
    except Exception:  # noqa: BLE001 - as a reader might
        return


def caught_by_a_reader() -> None:
    try:
        raise KeyError("x")
    except KeyError:
        structlog.get_logger().exception("source_broken")


_kept: list[bytes] = []


def test_a_loop_inside_an_except_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "CPU_S", 0.3)
    (failure,) = fed(swallow_all).failures
    assert failure.startswith("planted --seed 1 --only 0: Hang")


@pytest.mark.parametrize(
    ("does", "message"),
    [
        pytest.param(lambda: {}["x"], "KeyError", id="an undeclared exception"),
        pytest.param(
            lambda: bytearray(200 << 20), "Harm: [0-9]+ MiB for", id="much memory for one input"
        ),
        pytest.param(
            caught_by_a_reader,
            "Harm: only logged: source_broken",
            id="an exception that was only logged",
        ),
    ],
)
def test_each_harm_is_reported(
    monkeypatch: pytest.MonkeyPatch, does: Callable[[], object], message: str
) -> None:
    # The kernel's time for 200 MiB alone depends on the machine.
    monkeypatch.setattr(watchdog, "CPU_S", PATIENCE_S)
    (failure,) = fed(does).failures
    assert re.match(f"planted --seed 1 --only 0: {message}", failure)


def test_memory_that_is_not_freed_is_reported() -> None:
    try:
        failures = fed(lambda: _kept.append(bytes(range(256)) * 4096), 300).failures
    finally:
        _kept.clear()
    assert any("stay of 300 inputs" in failure for failure in failures)


@pytest.mark.slow
def test_harmless_settings_have_no_findings() -> None:
    tally = fed(lambda: None, 300)
    assert (tally.inputs, tally.taken, tally.failures) == (300, 300, [])


def report_of(name: str) -> Event:
    tree = deepcopy(OBJECTS["gpunodes"][0])
    tree["metadata"]["name"] = name
    return GPUNodeSeen(decode_gpunode(msgspec.json.encode(tree)), 1000.0)


def test_a_node_that_changes_the_answers_about_another_node_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted: changes of the hostile node are also applied to a sound one."""
    deliver = World.deliver

    def leak(world: World, events: Sequence[Event]) -> None:
        deliver(world, events)
        if any(isinstance(e, GPUNodeSeen) and e.gpunode.name == BAD for e in events):
            deliver(world, [report_of(NODES[1])])

    def planted() -> WatchTarget:
        target = WatchTarget("gpunodes", listed=False)
        monkeypatch.setattr(World, "deliver", leak)
        return target

    failures = attacked(planted, range(60), 1).failures
    assert any("a sound node is not what it was" in failure for failure in failures)


def test_a_pod_that_passes_a_full_node_is_reported() -> None:
    target = WatchTarget("gpunodes", listed=False)
    world = target.world
    world.deliver([NodeSeen(kube_node(BAD)), report_of(BAD)])
    target.offer_beside()
    tree = deepcopy(OBJECTS["gpunodes"][0])
    for device in tree["status"]["devices"]:
        device["memory"] = 1 << 30
    # Planted: what is judged is another object than the one that decided.
    world.cluster._objects.gpunodes[BAD] = decode_gpunode(msgspec.json.encode(tree))
    with pytest.raises(Exception, match="2Gi are found to fit"):
        target.offer_beside()


def test_a_view_that_one_object_breaks_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: rows of pods cannot be made."""

    def broken(*args: object) -> None:
        raise ValueError

    monkeypatch.setattr(GpuPods, "of", broken)
    monkeypatch.setattr(watch, "_VIEWS", [("pods", None)])
    failures = attacked(lambda: WatchTarget("pods", listed=True), range(20), 1).failures
    assert any("pods: 500" in failure for failure in failures)


def test_a_verb_that_reserves_by_itself_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: every filter call binds a pod."""
    call = World.call

    def binds(world: World, verb: str, *chunks: bytes, **how: Any) -> Any:
        if verb == "filter" and len(chunks[0]) % 3 == 0:
            held = world.store.read_gpunode(NODES[0])
            assert held is not None
            pod = next(each for each in world.store.list_pods() if each.metadata.name == "small")
            reservations = {**held.spec.reservations, pod.metadata.uid: reservation({"GPU-a": GIB})}
            world.store.write_spec(held, GPUNodeSpec(initialised=True, reservations=reservations))
        return call(world, verb, *chunks, **how)

    monkeypatch.setattr(World, "call", binds)
    monkeypatch.setattr(World, "__init__", _first(World.__init__, monkeypatch, call, binds))
    failures = attacked(lambda: VerbTarget("filter"), range(30), 1).failures
    assert any("reservations changed" in f or "answer to" in f for f in failures)


def _first(
    init: Callable[[World], None], patch: pytest.MonkeyPatch, sound: Any, planted: Any
) -> Callable[[World], None]:
    """Begin soundly: the first answers are those that all others are compared with."""

    def begin(world: World) -> None:
        patch.setattr(World, "call", sound)
        init(world)
        patch.setattr(World, "call", planted)

    return begin
