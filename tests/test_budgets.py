"""Every suite says how long it may take, and a run says how long it took."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.budgets import BUDGETS_S, suite_of
from tests.controlplane import ROOT

WARM_LIMIT_S = 15 * 60

SLOW_FIXTURE = """
import time, pytest

@pytest.fixture(scope="session")
def server():
    time.sleep(0.2)
    yield
    time.sleep(0.2)

def test_first(server):
    time.sleep(0.2)
"""


def run(folder: Path, conftest: str = "") -> subprocess.CompletedProcess[str]:
    """A run of its own over the folder's tests, with a copy of the table of budgets."""
    shutil.copy(ROOT / "tests/budgets.py", folder)
    folder.joinpath("pytest.ini").write_text("[pytest]\ntestpaths = tests\npythonpath = .\n")
    folder.joinpath("tests/conftest.py").write_text(
        f"import budgets\npytest_plugins = ['budgets']\n{conftest}"
    )
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def module(folder: Path, suite: str, text: str) -> None:
    path = folder / "tests" / suite / "test_it.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_a_suite_without_a_budget_is_not_collected(tmp_path: Path) -> None:
    module(tmp_path, "state", "def test_state(): pass")
    module(tmp_path, "unheard_of", "def test_of_it(): pass")
    done = run(tmp_path)
    assert done.returncode == 4, done.stdout
    assert "no budget in tests/budgets.py for: unheard_of; right is" in done.stderr
    assert "passed" not in done.stdout


def test_fixtures_count_and_a_suite_over_its_budget_is_warned_of(tmp_path: Path) -> None:
    module(tmp_path, "state", SLOW_FIXTURE)
    module(tmp_path, "agent", "def test_agent(): pass")
    done = run(tmp_path, "budgets.BUDGETS_S.update(state=0, agent=1000)")
    assert done.returncode == 0, done.stdout
    (state,) = re.findall(r"^state +(\S+) +0  WARNING: over its budget$", done.stdout, re.MULTILINE)
    assert float(state) >= 0.6  # what sleeps, in setup, test and teardown
    assert re.search(r"^agent +\S+ +1000$", done.stdout, re.MULTILINE)


def test_a_suite_is_a_folder_and_the_modules_beside_them_are_one() -> None:
    assert suite_of("tests/scheduler/test_extender_v1.py::test_it[a::b/c]") == "scheduler"
    assert suite_of("tests/contract/deep/test_x.py::T::test_it") == "contract"
    assert suite_of("tests/test_cli.py::test_it") == "modules beside"


def test_no_budget_outlives_its_suite_and_together_they_fit_a_warm_run() -> None:
    folders = {path.parent for path in ROOT.glob("tests/**/test_*.py")}
    suites = {suite_of(str((folder / "x").relative_to(ROOT))) for folder in folders}
    assert set(BUDGETS_S) == suites
    assert sum(BUDGETS_S.values()) <= 4 * WARM_LIMIT_S  # four run side by side
