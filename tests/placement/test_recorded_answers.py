"""What NVIDIA's device plugin was recorded to answer, against what is said of it here."""

import msgspec

from tests.nvidia.recorded import RECORDED, Recording
from tests.placement import brute

RECORDINGS = msgspec.json.decode(RECORDED.read_bytes(), type=list[Recording])


def test_recorded_answers_are_our_candidates() -> None:
    assert len(RECORDINGS) >= 150
    for recording in RECORDINGS:
        agrees(recording, recording.state().predicted())


def test_the_oracle_plays_the_plugin_that_was_recorded() -> None:
    for recording in RECORDINGS:
        gpus = tuple(
            brute.Gpu(recording.replicas, recording.replicas - len(free) - sick, sick, 0, numa)
            for free, sick, numa in recording.gpus
        )
        node = brute.Node(gpus, aligned=recording.aligned)
        agrees(recording, brute.could_get(node, [], recording.size))


def agrees(recording: Recording, expected: set[int]) -> None:
    """Of several replicas at once the plugin, of this version, gives less than its rule allows."""
    given = set(recording.given)
    assert given == expected or (recording.size > 1 and given < expected), recording
