"""Feeds a few inputs to every target. ``make fuzz`` feeds any number."""

import pytest

from tests.fuzz.targets import TARGETS
from tests.fuzz.watchdog import attacked

SEED = 7


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_input_is_accepted_or_rejected_without_other_effects(name: str) -> None:
    share, make = TARGETS[name]
    tally = attacked(make, range(min(30 + share, 10 * share // 3)), SEED)
    assert not tally.failures, "\n".join(tally.failures)
    # Some inputs pass the first check.
    assert tally.taken, "nothing was accepted"
