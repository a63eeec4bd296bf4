"""Checks the declarations themselves."""

import subprocess
from fnmatch import fnmatchcase

import pytest

from tests.controlplane import ROOT
from tests.tiers.inputs import DECLARED, Repository


def test_every_declared_module_and_pattern_exists() -> None:
    files = Repository(ROOT).files
    assert DECLARED.keys() <= files
    for module, patterns in DECLARED.items():
        for glob in patterns:
            assert any(fnmatchcase(each, glob) for each in files), (module, glob)


@pytest.mark.parametrize(("variables", "mode"), [([], "skip"), (["ALL=1"], "run")])
def test_make_test_skips_unchanged_modules_unless_all_is_set(
    variables: list[str], mode: str
) -> None:
    command = ["make", "--dry-run", "all", *variables]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f" -p tests.tiers.plugin --unchanged={mode} " in done.stdout
