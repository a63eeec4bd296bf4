"""Checks that the explanation of each kind of node equals the documentation."""

import pytest

from headroom.contract.reasons import Reason
from tests.state.kinds import DOCUMENT, KINDS, Kind, between, section


def test_the_documentation_matches_the_explanations() -> None:
    assert between(DOCUMENT.read_text().splitlines()) == list(section()), (
        "run: python -m tests.state.kinds"
    )


@pytest.mark.parametrize("kind", [pytest.param(kind, id=kind.title) for kind in KINDS])
def test_every_explanation_is_short_and_has_a_known_sentence(kind: Kind) -> None:
    lines = kind.told()
    assert lines[0].startswith("n: ")
    assert all(len(line) <= 150 for line in lines), lines
    sentence = lines[0].removeprefix("n: ")
    rejected = sentence in {reason.sentence for reason in Reason}
    assert rejected or sentence.startswith("fits, on ")
