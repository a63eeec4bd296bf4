"""The judge of overcommitted memory, which decides whether other tests pass."""

import ast
from pathlib import Path

import pytest

from tests import judge

FULL = [("a", 20), ("b", 24), ("a", 4)]


def test_a_full_memory_is_not_overcommitted_and_one_more_is() -> None:
    has = {"a": 24, "b": 24, "c": 24}
    assert judge.excess(FULL, has) == {}
    assert judge.excess([*FULL, ("a", 1)], has) == {"a": 1}
    assert judge.excess([*FULL, ("c", 30)], has) == {"c": 6}


def test_what_sits_in_a_memory_that_is_not_there_is_no_verdict() -> None:
    with pytest.raises(KeyError):
        judge.excess([("d", 1)], {"a": 24})


def test_it_shares_no_code_with_the_product() -> None:
    tree = ast.parse(Path(judge.__file__).read_text())
    assert not any(isinstance(each, ast.Import) for each in ast.walk(tree))
    imports = [each.module for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)]
    assert sorted(map(str, imports)) == ["collections", "collections.abc", "typing"]
