"""Candidates against NVIDIA's own plugin: its answers lie inside, and every one of them comes.

The latter for single replicas. Of several for one container it takes the later ones, where devices
are equal by then, from the device it took the one before from: Go sorts few things stably. Other
versions do the opposite, so we allow for either.

Of v0.19.3, which knows the policy ``distributed`` only; ``packed`` came with v0.20.0, which cannot
be built here: ``test_plugin`` and ``test_resolutions`` hold it against its source, transcribed.
"""

import os
import random

import msgspec
import pytest

from tests.controlplane import built
from tests.plugin.recorded import RECORDED, Recording
from tests.plugin.states import State, answered, states, walked
from tests.plugin.stock import StockPlugin

#: GPUs and replicas of the plugins that are asked, and how many states of each.
ASKED = [(1, 2, 20), (2, 16, 300), (3, 5, 400), (4, 4, 500), (5, 3, 300), (6, 8, 300), (8, 10, 300)]
WALKS = 5


@pytest.fixture
def _root(request: pytest.FixtureRequest) -> None:
    if os.geteuid() != 0:
        pytest.skip("the plugin's paths are fixed: it needs a mount namespace of its own, and root")
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():  # the first build takes minutes and says so
        built("nvidia-device-plugin")


@pytest.mark.slow
@pytest.mark.usefixtures("_root")
def test_its_answers_are_our_candidates() -> None:
    tried = inside = tight = walks = answers = 0
    draw = random.Random(1)
    for gpus, replicas, count in ASKED:
        plugin = StockPlugin(gpus, replicas)
        try:
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
                assert state.size > 1 or seen.keys() == predicted, state
                tight += seen.keys() == predicted
        finally:
            plugin.stop()
    print(f"{tried} states: {inside} inside, {tight} tight, {answers} devices; {walks} walks")  # noqa: T201
    assert tried == sum(count for _, _, count in ASKED)
    assert tight > 1000


@pytest.mark.slow
@pytest.mark.usefixtures("_root")
def test_whole_gpus_are_all_candidates() -> None:
    """Of those it takes the same ones each time, by their NVLinks: we allow for any."""
    plugin = StockPlugin(4, 1)
    try:
        for state in states(1, 4, seed=1, count=40):
            if not state.waiting and not state.aligned:
                answer = plugin.prefer(state.ids([0, 1]), [], state.size)[0]
                chosen = {int(device.removeprefix("GPU-")) for device in answer}
                assert chosen <= state.predicted()
    finally:
        plugin.stop()


def test_recorded_answers_are_our_candidates() -> None:
    recordings = msgspec.json.decode(RECORDED.read_bytes(), type=list[Recording])
    assert len(recordings) >= 150
    for recording in recordings:
        state: State = recording.state()
        given = set(recording.given)
        assert given == state.predicted() or (state.size > 1 and given < state.predicted()), state
