"""A few inputs for every target; ``make fuzz`` feeds as many as one likes."""

from functools import partial

import pytest

from tests.fuzz.targets import SHARES, made
from tests.fuzz.watchdog import attacked

SEED = 7


@pytest.mark.parametrize("name", SHARES)
def test_hostile_input_is_accepted_or_rejected_and_nothing_else(name: str) -> None:
    tally = attacked(partial(made, name), range(30 + SHARES[name]), SEED)
    assert not tally.failures, "\n".join(map(str, tally.failures))
    # Some of them are close enough to valid input to be parsed.
    assert tally.taken, "nothing was taken"
