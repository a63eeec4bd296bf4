"""Compares the model of the plugin with the real plugin, which is called directly, and with its
sources.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

import grpc
import pytest

from tests.driver import Gpu
from tests.nvidia.conftest import binaries, root
from tests.nvidia.stock import StockPlugin
from tests.standin.plugin import Counts, Plugin, PluginRefused, Settings, by_device, device_of

__all__ = ["binaries", "root"]

T = TypeVar("T")


GPUS = [Gpu(f"GPU-{number}") for number in range(4)]


def ids(*free: int) -> list[str]:
    """Return this number of replica IDs of each device, the last ones first."""
    return [f"GPU-{gpu}::{3 - n}" for gpu, count in enumerate(free) for n in range(count)]


#: Available replicas, required replicas, size, and the number of possible choices.
State = tuple[list[str], list[str], int, int]
STATES: dict[str, State] = {
    "all free: any device": (ids(4, 4, 4, 4), [], 1, 4),
    "one less: any of the others": (ids(3, 4, 4, 4), [], 1, 3),
    "one more: it alone": (ids(3, 3, 3, 4), [], 1, 1),
    "two of a free node: any two devices": (ids(4, 4, 4, 4), [], 2, 6),
    "two where one device is nearly full: both on one": (ids(4, 1, 0, 0), [], 2, 1),
    "a device that catches up stays before the others": (ids(3, 1, 2, 0), [], 2, 1),
    "and goes behind when it is past them": (ids(3, 1, 2, 0), [], 3, 1),
    "three of two alike: either twice": (ids(2, 2, 0, 0), [], 3, 2),
    "four of four alike: one of each": (ids(3, 3, 3, 3), [], 4, 1),
    "what must be is allocated already": (ids(2, 2, 2, 2), ["GPU-0::3"], 3, 3),
}


def outcome(ask: Callable[..., T], *arguments: object) -> T | str:
    """Return the answer of the model, or the text of its error."""
    try:
        return ask(*arguments)
    except PluginRefused as why:
        return str(why)


@pytest.fixture
def real(root: None, binaries: object) -> Iterator[StockPlugin]:
    plugin = StockPlugin(4, 4)
    yield plugin
    plugin.stop()


def preferred(real: StockPlugin, available: list[str], must: list[str], size: int) -> list[str]:
    try:
        return real.prefer(available, must, size)[0]
    except grpc.RpcError as rejected:
        raise PluginRefused(rejected.details()) from None


def test_the_real_plugin_makes_exactly_the_choices_of_the_model(real: StockPlugin) -> None:
    model = Plugin(GPUS, Settings(4))
    for available, must, size, count in STATES.values():
        options = model.options(available, must, size)
        assert len(options) == count
        seen: set[Counts] = set()
        replicas: Counter[str] = Counter()
        # The chance that 300 answers miss the rarest of six choices is 10^-20.
        for answer in map(frozenset, real.prefer(available, must, size, 300)):
            assert model.allows(answer, available, must, size)
            seen.add(by_device(answer - set(must)))
            replicas.update(answer)
        assert seen == options
        chosen = {device for each in options for device, _ in each}
        assert {r for r in available if device_of(r) in chosen} <= replicas.keys()


def test_the_real_plugin_answers_and_fails_as_the_model_allows(real: StockPlugin) -> None:
    lots = random.Random(7)
    model = Plugin(GPUS, Settings(4))
    every = ids(4, 4, 4, 4)
    rejected = 0
    for _ in range(600):
        available = lots.sample([*every, "GPU-9::0"], lots.randint(0, 17))
        must = lots.sample(available, lots.randint(0, min(2, len(available))))
        size = lots.randint(len(must), 6)
        answer = outcome(preferred, real, available, must, size)
        options = outcome(model.options, available, must, size)
        if isinstance(options, str) or isinstance(answer, str):
            assert answer == options
            rejected += 1
        else:
            assert model.allows(frozenset(answer), available, must, size), options
    assert 30 < rejected < 300


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_draws_give_exactly_the_possible_choices(state: State) -> None:
    available, must, size, count = state
    model = Plugin(GPUS, Settings(4))
    lots = random.Random(1)
    drawn = [model.prefer(available, must, size, lots) for _ in range(300)]
    assert all(model.allows(each, available, must, size) for each in drawn)
    assert {by_device(each - set(must)) for each in drawn} == model.options(available, must, size)
    assert len(model.options(available, must, size)) == count


# The model of v0.20.0 follows its sources. It is not compared with the real plugin, because no
# proxy has the module. The assertions about `packed` were once compared with the real binary.

PACKED = Settings(4, policy="packed", release=20)


@pytest.mark.parametrize(
    ("available", "size", "choices"),
    [
        pytest.param(ids(4, 4, 4, 4), 1, 4, id="all free: any device"),
        pytest.param(ids(4, 4, 4, 3), 1, 1, id="the device in use"),
        pytest.param(ids(4, 4, 4, 4), 2, 4, id="two replicas: both on one device"),
    ],
)
def test_packed_fills_a_device_before_it_uses_the_next(
    available: list[str], size: int, choices: int
) -> None:
    model = Plugin(GPUS, PACKED)
    options = model.options(available, [], size)
    assert len(options) == choices
    assert all(counts == ((device, size),) for counts in options for device, _ in counts)
    lots = random.Random(1)
    drawn = {by_device(model.prefer(available, [], size, lots)) for _ in range(200)}
    assert drawn == options


def test_from_v0_20_a_tie_goes_to_the_device_with_fewer_picks_of_the_request() -> None:
    old, new = (Plugin(GPUS, Settings(4, release=release)) for release in (19, 20))
    available = ids(4, 3, 0, 0)  # After the first pick, both devices have one allocated replica.
    assert old.options(available, [], 2) == {(("GPU-0", 2),)}
    assert new.options(available, [], 2) == {(("GPU-0", 1), ("GPU-1", 1))}
