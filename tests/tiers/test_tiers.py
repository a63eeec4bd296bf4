"""Checks that a module is left out only if it passed with the same inputs and read nothing else."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.controlplane import ROOT
from tests.tiers import reads
from tests.tiers.inputs import Repository

#: A clone with a test module, which imports ``kit`` and reads ``data/declared``.
FILES = {
    "pyproject.toml": "[tool.pytest.ini_options]\ntestpaths = ['tests']\n",
    "data/declared": "text",
    "data/other": "text",
    "product/__init__.py": "",
    "product/__main__.py": "",
    "tests/conftest.py": (
        "from tests.tiers.inputs import DECLARED\n"
        "DECLARED.clear()\n"
        "DECLARED['tests/it/test_it.py'] = ('data/declared',)\n"
    ),
    "tests/it/conftest.py": "",
    "tests/it/kit.py": "from pathlib import Path\nDATA = Path(__file__).parents[2] / 'data'\n",
    "tests/it/test_it.py": (
        "from tests.it.kit import DATA\n"
        "def test_reads():\n    assert (DATA / 'declared').read_text()\n"
        "def test_more():\n    pass\n"
    ),
    "tests/it/test_product.py": "def test_product():\n    pass\n",
}
PLUGIN = (
    *(f"tests/tiers/{name}.py" for name in ("inputs", "plugin", "reads")),
    "tests/gobin/build.py",
)
MODULE = "tests/it/test_it.py"
NOT_RUN = f"2 tests of {MODULE} not run: inputs unchanged since they passed (ALL=1 runs them)"

UNDECLARED = (
    f"WARNING: {MODULE} will run again, because it read files that tests/tiers/inputs.py does not "
    "declare: data/other"
)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in PLUGIN:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    (folder / ".gitignore").write_text("__pycache__\n.pytest_cache\n")
    return folder


def run(clone: Path, *arguments: str, unchanged: str = "skip", passes: bool = True) -> str:
    """Run the clone's tests as ``make test`` does. Return the output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.tiers.plugin"]
    done = subprocess.run(
        [*command, "--import-mode=importlib", f"--unchanged={unchanged}", *arguments],
        cwd=clone,
        env={
            **os.environ,
            "HEADROOM_CACHE": str(clone.parent / "cache"),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # which takes half of the time
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode == 0) == passes, done.stdout + done.stderr
    return done.stdout


def count(output: str) -> int:
    """Return the number of tests that passed."""
    found = re.search(r"(\d+) passed", output)
    return int(found[1]) if found else 0


@pytest.mark.slow
def test_a_module_that_passed_is_left_out_with_a_line_in_the_summary(clone: Path) -> None:
    first = run(clone)
    assert count(first) == 3
    assert "not run" not in first
    second = run(clone)
    assert count(second) == 1
    assert NOT_RUN in second.splitlines()
    assert count(run(clone, unchanged="run")) == 3
    # A name on the command line runs it.
    assert count(run(clone, MODULE)) == 2


@pytest.mark.slow
def test_workers_record_and_leave_out_the_same_modules(clone: Path) -> None:
    workers = "-p", "xdist", "-n", "2", "--dist", "loadfile"
    assert count(run(clone, *workers)) == 3
    second = run(clone, *workers)
    assert count(second) == 1
    assert NOT_RUN in second.splitlines()
    append("def test_other():\n    (DATA / 'other').read_text()\n")(clone)
    assert UNDECLARED in run(clone, *workers)


@pytest.mark.slow
def test_a_changed_input_runs_the_module_again(clone: Path) -> None:
    run(clone)
    for name in ("data/declared", MODULE, "tests/it/kit.py", "tests/it/conftest.py"):
        with (clone / name).open("a") as file:
            file.write("\n# changed\n")
        assert count(run(clone)) == 3, name
    (clone / "data/other").write_text("changed")
    assert count(run(clone)) == 1
    # A version outside of the repository is an input, too.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_KUBERNETES", "1.34")
        assert count(run(clone)) == 3


def append(text: str) -> Callable[[Path], None]:
    def change(clone: Path) -> None:
        with (clone / MODULE).open("a") as file:
            file.write(text)

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "arguments", "passes"),
    [
        pytest.param("def test_fails():\n    assert False\n", [], False, id="failed"),
        pytest.param(
            "import pytest\ndef test_skips():\n    pytest.skip()\n", [], True, id="skipped"
        ),
        pytest.param(
            "import pytest\n@pytest.fixture(autouse=True)\ndef broken():\n    yield\n    1 / 0\n",
            [],
            False,
            id="failed at the end",
        ),
        pytest.param("", ["-k", "reads or product"], True, id="deselected"),
        pytest.param("", [f"{MODULE}::test_reads"], True, id="named"),
        pytest.param(
            "def test_changes():\n    (DATA / 'declared').write_text('changed')\n",
            [],
            True,
            id="an input changed",
        ),
    ],
)
def test_a_module_without_all_tests_passed_is_not_recorded(
    clone: Path, text: str, arguments: list[str], passes: bool
) -> None:
    append(text)(clone)
    run(clone, *arguments, passes=passes)
    assert not (clone.parent / "cache/passed").exists()


CACHED = "import functools\n@functools.cache\ndef other():\n    (DATA / 'other').read_text()\n"
USES_CACHE = "from tests.it.kit import other\ndef test_cache():\n    other()\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({MODULE: "def test_other():\n    (DATA / 'other').read_text()\n"}, id="test"),
        pytest.param({"tests/it/kit.py": "(DATA / 'other').read_text()\n"}, id="import"),
        pytest.param(
            {"tests/it/kit.py": CACHED, "tests/it/test_before.py": USES_CACHE, MODULE: USES_CACHE},
            id="cached by another module",
        ),
    ],
)
def test_a_module_that_reads_another_file_is_not_recorded(
    clone: Path, changes: dict[str, str]
) -> None:
    for name, text in changes.items():
        with (clone / name).open("a") as file:
            file.write(text)
    assert UNDECLARED in run(clone).splitlines()
    assert not (clone.parent / "cache/passed").exists()


def started(*command: str) -> Callable[[], object]:
    return lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("read", "found"),
    [
        (lambda: Path("data/other").read_text(), ["data/other"]),
        (lambda: os.open("data/other", os.O_RDONLY), ["data/other"]),
        (lambda: Path("link/other").read_text(), ["data/other"]),
        (lambda: list(Path("data").glob("*")), ["data/other"]),
        (started("cat", "data/declared"), []),
        (started("cat", "data/other"), ["data/other"]),
        (started("cat", "--", f"{os.curdir}/data/other"), ["data/other"]),
        (started("ls", "./data"), ["data/other"]),
        (started("ls", "--hide=./data/other"), ["data/other"]),
        (lambda: subprocess.run(["ls"], cwd="data", check=True), ["data/other"]),
        (
            started(sys.executable, "-m", "product"),
            ["product/__init__.py", "product/__main__.py"],
        ),
        (started("env", sys.executable, "-c", "import product"), ["product/__init__.py"]),
        (lambda: sys.audit("tests.forked", "product"), [
            "product/__init__.py", "product/__main__.py",
        ]),
        (lambda: Path("/etc/hosts").read_text(), []),
    ],
)  # fmt: skip
def test_reads_are_found(
    clone: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[], object], found: list[str]
) -> None:
    monkeypatch.chdir(clone)
    (clone / "link").symlink_to("data")
    repository = Repository(clone)
    inputs = repository.inputs(MODULE, ["data/declared"])
    seen: set[reads.Read] = set()
    reads.record(seen.add)
    try:
        read()
    finally:
        reads.record(None)
    assert reads.undeclared(repository, inputs, seen) == found


def test_imports_in_functions_and_of_imported_modules_are_inputs(clone: Path) -> None:
    (clone / "tests/it/kit.py").write_text("def of_product():\n    import product.__main__\n")
    inputs = Repository(clone).inputs(MODULE, ())
    assert {"product/__init__.py", "product/__main__.py", "tests/it/kit.py"} < inputs
    assert {"pyproject.toml", "tests/conftest.py", "tests/it/conftest.py"} < inputs
    assert "data/other" not in inputs
