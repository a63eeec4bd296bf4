"""Checks the declarations themselves."""

import os
import subprocess

import pytest

from tests.controlplane import ROOT
from tests.soak.started import MUTANTS
from tests.tiers.inputs import DECLARED, Repository

STEERING = "tests/kubelet/test_steering.py"


def test_every_declared_module_and_pattern_exists() -> None:
    repository = Repository(ROOT)
    assert DECLARED.keys() <= repository.files
    for module, patterns in DECLARED.items():
        for each in patterns:
            assert repository.matching([each]), (module, each)


def test_tests_of_the_agent_do_not_depend_on_other_programs() -> None:
    repository = Repository(ROOT)
    inputs = repository.inputs(STEERING, DECLARED[STEERING])
    assert {"agent/__main__.py", "headroom/contract/gpunode.py"} < inputs
    others = ("extender/", "headroom/core/", "headroom/console/", "headroom/runtime/")
    assert [each for each in inputs if each.startswith(others)] == []


@pytest.mark.parametrize(("variables", "mode"), [([], "skip"), (["ALL=1"], "run")])
def test_make_test_skips_unchanged_modules_unless_all_is_set(
    variables: list[str], mode: str
) -> None:
    command = ["make", "--dry-run", "all", *variables]
    # Make exports its own variables, and ALL if it is set.
    own = {
        name: value for name, value in os.environ.items() if name != "ALL" and "MAKE" not in name
    }
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=True)
    assert f" -p tests.tiers.plugin --unchanged={mode} " in done.stdout


def test_the_soak_of_altered_processes_depends_on_every_module_that_is_altered() -> None:
    altered = {f"{module.replace('.', '/')}.py" for module, *_ in MUTANTS.values()}
    assert altered < {*DECLARED["tests/soak/test_detection.py"]}
