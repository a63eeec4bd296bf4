"""Compares our candidates with NVIDIA's plugin. All of the plugin's answers must be candidates, and
each candidate must occur.

For a container with several replicas, v0.19.3 prefers the device of the previous replica among
equal devices, because Go keeps sorted elements in order. v0.20.0 does the opposite. Our candidates
cover exactly both versions, because no report shows which version runs.

The tests run v0.19.3, which has only the policy ``distributed``. v0.20.0, which added ``packed``,
cannot be built here, so a model of its source code replaces it.
"""

import contextlib
import random
from collections.abc import Iterator

import pytest

from tests.nvidia.states import answered, devices_of, modelled, states, walked
from tests.nvidia.stock import StockPlugin

#: The numbers of GPUs, replicas and states for each tested plugin.
ASKED = [(1, 2, 10), (2, 16, 150), (3, 5, 250), (4, 4, 300), (5, 3, 200), (6, 8, 200), (8, 10, 150)]
WALKS = 5


@contextlib.contextmanager
def stock_plugin(gpus: int, replicas: int) -> Iterator[StockPlugin]:
    plugin = StockPlugin(gpus, replicas)
    try:
        yield plugin
    finally:
        plugin.stop()


@pytest.mark.usefixtures("root", "binaries")
def test_the_plugins_answers_are_our_candidates() -> None:
    tried = inside = single = tight = walks = answers = 0
    draw = random.Random(1)
    for gpus, replicas, count in ASKED:
        with stock_plugin(gpus, replicas) as plugin:
            for state in states(replicas, gpus, seed=gpus, count=count):
                tried += 1
                predicted = state.predicted()
                if state.waiting:
                    for _ in range(WALKS):
                        assert walked(plugin, state, draw) in predicted, state
                    walks += WALKS
                    continue
                seen = answered(plugin, state, predicted)
                answers += seen.total()
                assert seen.keys() <= predicted, state
                inside += 1
                single += state.size == 1
                tight += seen.keys() == predicted
                assert seen.keys() == modelled(state, release=19), state
                assert seen.keys() | modelled(state, release=20) == predicted, state
                assert state.size > 1 or seen.keys() == predicted, state
    print(  # noqa: T201
        f"{tried} states: {inside} asked, all inside; {tight} tight for this release alone, of them"
        f" all {single} that ask for one replica, and all for both releases ({answers} devices"
        f" given); {walks} walks"
    )
    assert tried == sum(count for _, _, count in ASKED)
    assert single > 350
    assert inside - tight > 20


@pytest.mark.usefixtures("root", "binaries")
def test_whole_gpus_are_all_candidates() -> None:
    """The plugin always chooses the same devices because of their NVLinks, but our candidates are
    all devices.
    """
    with stock_plugin(4, 1) as plugin:
        for state in states(1, 4, seed=1, count=40):
            if not state.waiting and not state.aligned:
                answer = plugin.prefer(state.ids([0, 1]), [], state.size)[0]
                assert set(devices_of(answer)) <= state.predicted()
