"""Checks that one command answers each question of an incident, as docs/operate/incident.md
shows.
"""

import statistics
from collections.abc import Iterator

import pytest

from tests.controlplane import ControlPlane
from tests.e2e.conftest import Tell
from tests.e2e.incident import incident
from tests.e2e.real import RealCluster

NODES = 3


@pytest.fixture
def cluster(plane: ControlPlane, binaries: None) -> Iterator[RealCluster]:
    """A cluster whose nodes have two 24 GiB GPUs each. Four pods can share a GPU."""
    real = RealCluster(plane, NODES, gpus=2, replicas=4)
    try:
        real.create()
        real.bring_up()
        yield real
    finally:
        real.close()


def test_each_question_of_an_incident_is_answered_by_one_command(
    cluster: RealCluster, tell: Tell
) -> None:
    answers = []
    for answer in incident(cluster):
        print(f"\n{answer.question}\n$ kubectl headroom {answer.command}\n{answer.text}")  # noqa: T201
        assert [each for each in answer.truth if each not in answer.text] == [], answer.text
        answers.append(answer)
    reading_s = sorted(answer.reading_s for answer in answers)
    tell(
        f"{len(answers)} questions, a command each; a person reads an answer in "
        f"{statistics.median(reading_s):.0f} s, the longest in {reading_s[-1]:.0f} s"
    )
