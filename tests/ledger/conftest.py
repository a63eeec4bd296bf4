"""Fixtures for tests of the ledger."""

import pytest

from tests.ledger.stage import Stage


@pytest.fixture
def stage() -> Stage:
    return Stage()
