"""Tests the sentence about the difference between the scores of two nodes."""

import pytest

from headroom.core.placement.node_order import difference


@pytest.mark.parametrize(
    ("ahead", "behind", "sentence"),
    [
        pytest.param(
            {"packing": 0.41, "sm_activity": 0.1, "slack": 0.05},
            {"packing": 0.2, "sm_activity": 0.14, "slack": 0.05},
            "a wins over b by packing +0.21, and loses 0.04 by sm_activity",
            id="one gain and one loss",
        ),
        pytest.param(
            {"packing": 0.3, "slack": 0.1},
            {"packing": 0.2, "slack": 0.08},
            "a wins over b by packing +0.10 and slack +0.02",
            id="two gains, the largest first",
        ),
        pytest.param(
            {"packing": 0.3},
            {"packing": 0.299},
            "a and b have equal scores; a wins by its free memory or its name",
            id="equal when rounded",
        ),
    ],
)
def test_two_nodes_are_compared_in_one_sentence(
    ahead: dict[str, float], behind: dict[str, float], sentence: str
) -> None:
    assert difference("a", "b", ahead, behind) == sentence
