"""Checks that a module is left out only if it passed and nothing that it read has changed."""

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
NOT_RUN = "2 tests of tests/it not run: inputs unchanged since they passed (ALL=1 runs them): it"


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
    assert count(run(clone, *workers)) == 4
    assert count(run(clone, *workers)) == 1
    (clone / "data/other").write_text("changed")
    assert count(run(clone, *workers)) == 4


@pytest.mark.slow
def test_only_modules_with_slow_tests_are_left_out(clone: Path) -> None:
    with (clone / "tests/conftest.py").open("a") as file:
        file.write("DECLARED.clear()\n")
    for left_out in (0, 0):
        assert count(run(clone)) == 3 - left_out
    append("import pytest\n@pytest.mark.slow\ndef test_slow():\n    pass\n")(clone)
    assert count(run(clone)) == 4
    assert count(run(clone)) == 1


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


READS_OTHER = "    return (DATA / 'other').read_text()\n"
CACHED = f"import functools\n@functools.cache\ndef other():\n{READS_OTHER}"
USES_CACHE = "from tests.it.kit import other\ndef test_cache():\n    other()\n"
SHARED = (
    "import pytest\nfrom tests.it.kit import DATA\n"
    f"@pytest.fixture(scope='session')\ndef other():\n{READS_OTHER}"
)
USES_SHARED = "def test_shared(other):\n    pass\n"


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
        pytest.param(
            {
                "tests/it/conftest.py": SHARED,
                "tests/it/test_before.py": USES_SHARED,
                MODULE: USES_SHARED,
            },
            id="a fixture that another module uses first",
        ),
    ],
)
def test_a_module_runs_again_if_a_file_that_it_read_has_changed(
    clone: Path, changes: dict[str, str]
) -> None:
    for name, text in changes.items():
        with (clone / name).open("a") as file:
            file.write(text)
    total = count(run(clone))
    left_out = total - count(run(clone))
    assert left_out > 0
    (clone / "data/other").write_text("changed")
    assert count(run(clone)) == total


def started(*command: str) -> Callable[[], object]:
    return lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("read", "found"),
    [
        (lambda: Path("data/other").read_text(), ["data/other"]),
        (lambda: os.open("data/other", os.O_RDONLY), ["data/other"]),
        (lambda: Path("link/other").read_text(), ["data/other"]),
        (lambda: list(Path("data").glob("*")), ["data/declared", "data/other"]),
        (started("cat", "data/declared"), ["data/declared"]),
        (started("cat", "data/other"), ["data/other"]),
        (started("cat", "--", f"{os.curdir}/data/other"), ["data/other"]),
        (started("ls", "./data"), ["data/declared", "data/other"]),
        (started("ls", "--hide=./data/other"), ["data/other"]),
        (lambda: subprocess.run(["cat", "/dev/null"], cwd="data", check=True), [
            "data/declared", "data/other",
        ]),
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
    assert found_in(clone, monkeypatch, read, declared=True) == found


@pytest.mark.parametrize(
    ("read", "found"),
    [
        (started("sleep", "0"), []),
        (lambda: sys.audit("tests.forked", "agent"), ["agent/data"]),
        (lambda: subprocess.run([sys.executable, "-m", "agent"], check=False), ["agent/data"]),
        (started("true", "data/declared"), ["data/declared"]),
        (started("true", "deploy/overlay"), ["deploy/base", "deploy/overlay"]),
        (started("true", f"--file={os.curdir}/data/other"), ["data/other"]),
        (started("true", "./tests/gobin/build.py"), ["tests/gobin/build.py"]),
        (lambda: sys.audit("tests.forked", "product", os.path.abspath("data/other")), [
            *("agent/data", "data/other", "deploy/base", "deploy/overlay"),
            *("product/__init__.py", "product/__main__.py"),
        ]),
    ],
)  # fmt: skip
def test_programs_of_other_modules_read_their_arguments_and_the_product(
    clone: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[], object], found: list[str]
) -> None:
    assert found_in(clone, monkeypatch, read, declared=False) == found


@pytest.mark.parametrize("command", [("cat", "/dev/null"), ("sh", "-c", "")])
def test_an_unknown_program_in_a_folder_reads_all_of_its_files(
    clone: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    read = started(*command)
    assert found_in(clone, monkeypatch, read, declared=False) == sorted(Repository(clone).files)


def found_in(
    clone: Path, patch: pytest.MonkeyPatch, read: Callable[[], object], declared: bool
) -> list[str]:
    """Return the files that a call reads in a clone, as the plugin records them."""
    patch.chdir(clone)
    (clone / "link").symlink_to("data")
    (clone / "agent").mkdir()
    (clone / "agent/data").touch()
    (clone / "deploy").mkdir()
    (clone / "deploy/base").touch()
    (clone / "deploy/overlay").touch()
    repository = Repository(clone)
    seen: set[reads.Read] = set()
    reads.record(seen.add)
    try:
        read()
    finally:
        reads.record(None)
    found = reads.patterns(repository, seen)
    kept = [each.removeprefix("?") for each in found if not (declared and each.startswith("?"))]
    return sorted(repository.matching(kept))


def test_imports_in_functions_and_of_imported_modules_are_inputs(clone: Path) -> None:
    (clone / "tests/it/kit.py").write_text("def of_product():\n    import product.__main__\n")
    inputs = Repository(clone).inputs(MODULE, ())
    assert {"product/__init__.py", "product/__main__.py", "tests/it/kit.py"} < inputs
    assert {"pyproject.toml", "tests/conftest.py", "tests/it/conftest.py"} < inputs
    assert "data/other" not in inputs
