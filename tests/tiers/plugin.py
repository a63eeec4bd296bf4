"""A pytest plugin that skips test modules that hardly depend on the product's code if their inputs
are unchanged.

``make test`` loads this plugin. ``--unchanged=skip`` skips a module in ``DECLARED`` if it has
passed with the same inputs before. ``--unchanged=run`` runs all modules. Both options record
modules that pass, outside the clone. A module is not recorded if one of its tests failed, was
skipped or did not run, if its inputs changed during the run, or if it read an undeclared file of
the repository.
"""

import contextlib
import functools
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.gobin.build import default_cache
from tests.tiers import reads
from tests.tiers.inputs import DECLARED, NOT_FOLLOWED, Repository

#: Maximum number of files in the folder that records passed modules. The oldest files are deleted.
MOST_RECORDS = 500


#: Maps each file of the repository to the files and directories that its import reads.
_imports: defaultdict[str, set[reads.Read]] = defaultdict(set)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--unchanged",
        choices=("skip", "run"),
        default="run",
        help="skip or run test modules that passed with the same inputs (tests/tiers/inputs.py)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    _record_imports(early_config.rootpath)


def _record_imports(root: Path) -> None:
    def sink(read: reads.Read) -> None:
        if (reader := reads.reader(root)) is not None:
            _imports[reader].add(read)

    reads.record(sink)


def pytest_configure(config: pytest.Config) -> None:
    reads.record(None)  # This plugin reads all inputs.
    # Run all modules if the folder is not a clone.
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        config.pluginmanager.register(Tier(config), "tier")
        _record_imports(config.rootpath)


class Tier:
    """The modules that a session skips, and the modules that pass."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.repository = Repository(config.rootpath)
        self.folder = default_cache().parent / "passed"
        given: Mapping[str, Any] = getattr(config, "workerinput", {})
        #: Hash of the inputs of each module.
        self.hashes: dict[str, str] = given.get("hashes") or self._hashes()
        #: Number of skipped tests of each skipped module.
        self.left_out: dict[str, int] = given.get("left_out", {})
        if not given and config.getoption("unchanged") == "skip":
            self.left_out = self._passed_before()
        #: Files that each module read but does not declare.
        self.undeclared: dict[str, list[str]] = {}
        self._collected: Counter[str] = Counter()
        self._passed: Counter[str] = Counter()
        self._incomplete: set[str] = set()
        #: The module whose test ran last.
        self._current = ""
        self._reads: defaultdict[str, set[reads.Read]] = defaultdict(set)

    def _hashes(self) -> dict[str, str]:
        return {
            module: self.repository.fingerprint(module, DECLARED[module]) for module in DECLARED
        }

    def _passed_before(self) -> dict[str, int]:
        found = {}
        for module, digest in self.hashes.items():
            record = self.folder / digest
            if record.exists():
                found[module] = int(record.read_text().split()[0])
                os.utime(record)
        return found

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return True if self._module(collection_path) in self.left_out else None

    def _module(self, path: Path) -> str:
        return os.path.relpath(path, self.config.rootpath)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._incomplete |= {self._module(item.path) for item in items}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        reads.record(None)
        self._collected.update(self._module(item.path) for item in session.items)
        if any("::" in argument for argument in self.config.args):
            self._incomplete |= {*DECLARED}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        module = self._module(item.path)
        if module not in DECLARED:
            self._current = module
            return (yield)
        if module != self._current:
            _clear_caches()
        self._current = module
        reads.record(self._reads[module].add)
        try:
            return (yield)
        finally:
            reads.record(None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        module = report.nodeid.partition("::")[0]
        if not report.passed:
            self._incomplete.add(module)
        elif report.when == "call":
            self._passed[module] += 1

    @pytest.hookimpl(tryfirst=True)  # Run before the worker sends its output.
    def pytest_sessionfinish(self) -> None:
        for module in DECLARED.keys() & self._reads.keys() - self._incomplete:
            if self._passed[module] == self._collected[module]:
                self._record(module)
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["undeclared"] = self.undeclared

    def _record(self, module: str) -> None:
        now = Repository(self.config.rootpath)
        if now.fingerprint(module, DECLARED[module]) != self.hashes[module]:
            return
        inputs = now.inputs(module, DECLARED[module])
        importers = inputs & _imports.keys() - NOT_FOLLOWED
        read = self._reads[module].union(*(_imports[file] for file in importers))
        if found := reads.undeclared(now, inputs, read):
            self.undeclared[module] = found
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.folder / f"{self.hashes[module]}.{os.getpid()}"
        unfinished.write_text(f"{self._passed[module]} {module}\n")
        unfinished.replace(self.folder / self.hashes[module])
        _prune(self.folder)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput |= {"hashes": self.hashes, "left_out": self.left_out}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.undeclared |= getattr(node, "workeroutput", {}).get("undeclared", {})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left_out or self.undeclared:
            terminalreporter.section("unchanged since they passed")
        for module, count in sorted(self.left_out.items()):
            terminalreporter.line(
                f"{count} tests of {module} not run: inputs unchanged since they passed "
                "(ALL=1 runs them)"
            )
        for module, files in sorted(self.undeclared.items()):
            terminalreporter.line(
                f"WARNING: {module} will run again, because it read files that "
                f"tests/tiers/inputs.py does not declare: {', '.join(files[:5])}"
                + (f" and {len(files) - 5} more" if len(files) > 5 else "")
            )


def _clear_caches() -> None:
    """Clear the caches of test functions, because calls of another module may have filled them."""
    for name, module in list(sys.modules.items()):
        if name.startswith("tests."):
            for each in vars(module).values():
                if isinstance(each, functools._lru_cache_wrapper):
                    each.cache_clear()


def _prune(folder: Path) -> None:
    records = sorted(folder.iterdir(), key=lambda each: each.stat().st_mtime)
    for each in records[:-MOST_RECORDS]:
        each.unlink(missing_ok=True)
