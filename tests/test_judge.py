"""Tests the function that finds overcommitted memory, because other tests depend on it."""

import ast
from pathlib import Path

import pytest

from tests import judge

FULL = [("a", 20), ("b", 24), ("a", 4)]


def test_a_full_memory_is_not_overcommitted_but_one_byte_more_is() -> None:
    has = {"a": 24, "b": 24, "c": 24}
    assert judge.excess(FULL, has) == {}
    assert judge.excess([*FULL, ("a", 1)], has) == {"a": 1}
    assert judge.excess([*FULL, ("c", 30)], has) == {"c": 6}


def test_use_of_an_unknown_memory_is_an_error() -> None:
    with pytest.raises(KeyError):
        judge.excess([("d", 1)], {"a": 24})


def test_the_judge_shares_no_code_with_the_product() -> None:
    tree = ast.parse(Path(judge.__file__).read_text())
    assert not any(isinstance(each, ast.Import) for each in ast.walk(tree))
    imports = [each.module for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)]
    assert sorted(map(str, imports)) == ["collections", "collections.abc", "typing"]
