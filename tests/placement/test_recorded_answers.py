"""Candidates against what NVIDIA's device plugin was recorded to answer."""

import msgspec

from tests.nvidia.recorded import RECORDED, Recording


def test_recorded_answers_are_our_candidates() -> None:
    recordings = msgspec.json.decode(RECORDED.read_bytes(), type=list[Recording])
    assert len(recordings) >= 150
    for recording in recordings:
        state = recording.state()
        given = set(recording.given)
        assert given == state.predicted() or (state.size > 1 and given < state.predicted()), state
