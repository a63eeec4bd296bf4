"""Fixtures for tests of the ledger."""

from collections.abc import Iterator

import pytest

from tests.blocking import Loop
from tests.ledger.stage import Stage


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    with Loop() as loop:
        yield loop
