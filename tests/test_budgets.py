"""Checks that every suite has a CPU budget, and that a test run reports the CPU of each suite."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.budgets import BUDGETS_S, suite_of
from tests.controlplane import ROOT
from tests.waiting import PATIENCE_S

#: Two cores for 15 minutes.
WARM_LIMIT_S = 2 * 15 * 60

#: A suite that uses 0.2 s in its setup, its test and its teardown, and 0.8 s in a process that ends
#: with the test, and in a process that still runs.
BUSY = """
import subprocess, sys, time, pytest

BUSY = "import time\\nwhile time.process_time() < 0.8: pass\\nprint(flush=True); time.sleep(60)"

def burn():
    end_s = time.process_time() + 0.2
    while time.process_time() < end_s:
        pass

@pytest.fixture(scope="session")
def server():
    burn()
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield
        burn()
        process.kill()

def test_first(server):
    subprocess.run([sys.executable, "-c", BUSY.partition("print")[0]], check=True)
    burn()
"""


def run(folder: Path, conftest: str = "", *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on the folder in a new process, with a copy of tests/budgets.py."""
    shutil.copy(ROOT / "tests/budgets.py", folder)
    folder.joinpath("pytest.ini").write_text("[pytest]\ntestpaths = tests\npythonpath = .\n")
    folder.joinpath("tests/conftest.py").write_text(
        f"import budgets\npytest_plugins = ['budgets']\n{conftest}"
    )
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def module(folder: Path, suite: str, text: str) -> None:
    path = folder / "tests" / suite / "test_it.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)


@pytest.mark.slow
def test_a_suite_without_a_budget_is_an_error(tmp_path: Path) -> None:
    module(tmp_path, "state", "def test_state(): pass")
    module(tmp_path, "unheard_of", "def test_of_it(): pass")
    done = run(tmp_path)
    assert done.returncode == 4, done.stdout
    assert "no budget in tests/budgets.py for: unheard_of. Example: " in done.stderr
    assert "passed" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "1", "--dist", "loadfile")])
def test_processes_and_fixtures_count_and_exceeding_a_budget_is_a_warning(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    module(tmp_path, "state", BUSY)
    module(tmp_path, "agent", "def test_agent(): pass")
    done = run(tmp_path, "budgets.BUDGETS_S.update(state=0, agent=1000)", *workers)
    assert done.returncode == 0, done.stdout
    (state,) = re.findall(r"^state +(\S+) +0  WARNING: over its budget$", done.stdout, re.MULTILINE)
    assert float(state) >= 2.2
    assert re.search(r"^agent +\S+ +1000$", done.stdout, re.MULTILINE)


def test_suites_are_folders_and_the_top_level_modules() -> None:
    assert suite_of("tests/scheduler/test_extender_v1.py::test_it[a::b/c]") == "scheduler"
    assert suite_of("tests/contract/deep/test_x.py::T::test_it") == "contract"
    assert suite_of("tests/test_cli.py::test_it") == "modules beside"


def test_budgets_match_the_suites_and_their_sum_is_limited() -> None:
    folders = {path.parent for path in ROOT.glob("tests/**/test_*.py")}
    suites = {suite_of(str((folder / "x").relative_to(ROOT))) for folder in folders}
    assert set(BUDGETS_S) == suites
    # The budgets are half above what a quiet machine needs.
    assert sum(BUDGETS_S.values()) / 1.5 <= WARM_LIMIT_S
