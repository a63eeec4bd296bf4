"""Checks that a short day of churn detects growth.

Most components get a second process with the same inputs, but it keeps data that it should discard.
``make test`` runs this module only if the day or one of the altered modules has changed
(tests/tiers), because twice as many processes take twice the CPU.
"""

import pytest

from tests.soak.short import growing
from tests.soak.site import ALTERED
from tests.soak.started import MUTANTS

pytestmark = pytest.mark.slow


def test_only_altered_processes_grow_with_history(request: pytest.FixtureRequest) -> None:
    assert growing(request, *MUTANTS) == {f"{part}{ALTERED}" for part in MUTANTS}
