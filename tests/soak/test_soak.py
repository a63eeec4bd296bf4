"""Runs a short day of churn, in which no process may keep growing.

``make soak`` runs a long day.
"""

import pytest

from tests.soak.short import growing

pytestmark = pytest.mark.slow


def test_no_process_grows_with_history(request: pytest.FixtureRequest) -> None:
    assert growing(request) == set()
