"""Compares recorded answers of NVIDIA's device plugin with our candidates."""

import pytest

from tests.nvidia.recorded import Recording, pinned_version, recorded
from tests.nvidia.states import modelled
from tests.placement import brute

RECORDED = recorded()
SINGLE = [each for each in RECORDED.answers if each.size == 1 and not each.waiting]
SEVERAL = [each for each in RECORDED.answers if each.size > 1]
ON_THEIR_WAY = [each for each in RECORDED.answers if each.waiting]


def test_the_recording_has_the_version_of_the_live_plugin() -> None:
    assert (RECORDED.plugin, RECORDED.policy) == (pinned_version(), "distributed")
    assert len(SINGLE) > 400
    assert len(SEVERAL) > 400
    assert len(ON_THEIR_WAY) > 350


@pytest.mark.parametrize("who", ["we", "the oracle"])
def test_recorded_answers_for_the_next_pod_equal_our_candidates(who: str) -> None:
    for recording in SINGLE:
        assert set(recording.given) == could_get(who, recording), recording


@pytest.mark.parametrize("who", ["we", "the oracle"])
def test_recorded_answers_for_several_replicas_are_among_our_candidates(
    who: str,
) -> None:
    """For several replicas at once, this plugin version uses fewer devices than its rule allows."""
    for recording in SEVERAL:
        assert set(recording.given) <= could_get(who, recording), recording


def test_each_plugin_release_covers_a_part_of_our_candidates() -> None:
    """v0.19.3 continues with the device that it chose last, and v0.20.0 with a device that it has
    not chosen yet. No report shows which version runs, and together they give all candidates."""
    narrower = 0
    for recording in SEVERAL:
        state, given = recording.state(), set(recording.given)
        assert given == modelled(state, release=19), recording
        assert given | modelled(state, release=20) == state.predicted(), recording
        narrower += given < state.predicted()
    assert narrower > 50


def test_recorded_answers_after_unconfirmed_pods_are_among_our_candidates() -> None:
    reached = candidates = 0
    for recording in ON_THEIR_WAY:
        expected = could_get("we", recording)
        assert set(recording.given) <= expected, recording
        reached += len(recording.given)
        candidates += len(expected)
    # Each state was tried only forty times, so most but not all possible answers occurred.
    assert reached >= 0.9 * candidates


def could_get(who: str, recording: Recording) -> set[int]:
    if who == "we":
        return recording.state().predicted()
    gpus = tuple(
        brute.Gpu(recording.replicas, recording.replicas - len(free) - sick, sick, 0, numa)
        for free, sick, numa in recording.gpus
    )
    return brute.could_get(brute.Node(gpus, aligned=recording.aligned), [], recording.size)
