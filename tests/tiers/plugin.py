"""A pytest plugin that skips slow test modules whose inputs are unchanged since they passed.

``make test`` loads this plugin. ``--unchanged=skip`` skips a module with slow tests if it has
passed with the same inputs before. ``--unchanged=run`` runs all modules. Both options record
modules that pass, outside the clone. A module is not recorded if one of its tests failed, was
skipped or did not run, or if one of its inputs changed during the run. Modules without slow tests
always run.
"""

import contextlib
import json
import os
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.gobin.build import default_cache
from tests.tiers import reads
from tests.tiers.inputs import DECLARED, NOT_FOLLOWED, Repository

#: Maximum number of files in the folder that records passed modules. The oldest files are deleted.
MOST_RECORDS = 1_000
#: Fixtures of these scopes also serve tests of later modules.
_SHARED = ("session", "package")

#: Maps each file of the repository to what its import and its functions with caches read. Such
#: reads happen once, and count for all modules that import the file.
_once: defaultdict[str, set[reads.Read]] = defaultdict(set)

Patterns = dict[str, list[str]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--unchanged",
        choices=("skip", "run"),
        default="run",
        help="skip or run slow test modules that passed with the same inputs (tests/tiers)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    _record_imports(early_config.rootpath)


def _record_imports(root: Path) -> None:
    def sink(read: reads.Read) -> None:
        for reader, _ in reads.readers(root):
            _once[reader].add(read)
            break

    reads.record(sink)


def pytest_configure(config: pytest.Config) -> None:
    reads.record(None)  # This plugin reads all inputs.
    # Run all modules if the folder is not a clone.
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        config.pluginmanager.register(Tier(config), "tier")
        _record_imports(config.rootpath)


class Tier:
    """The modules that a session skips, and the modules that pass. Workers of xdist send what they
    read to the session that started them, which records it.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.root = config, config.rootpath
        self.repository = Repository(self.root)
        self.folder = default_cache().parent / "passed"
        given: Mapping[str, Any] = getattr(config, "workerinput", {})
        #: Number of skipped tests of each skipped module.
        self.left_out: dict[str, int] = given.get("left_out", {})
        if not given and config.getoption("unchanged") == "skip":
            self.left_out = self._passed_before()
        self._began_s = time.time()
        self._collected: Counter[str] = Counter()
        self._slow: set[str] = set()
        self._passed: Counter[str] = Counter()
        self._incomplete: set[str] = set()
        self._reads: defaultdict[str, set[reads.Read]] = defaultdict(set)
        #: Maps each folder to what its fixtures read that are shared by modules.
        self._shared: defaultdict[str, set[reads.Read]] = defaultdict(set)

    def _passed_before(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for path in self.folder.glob("*"):
            # Ignore records of other versions of this plugin.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = json.loads(path.read_text())
                module, read = record["module"], record["read"]
                if module in found:
                    continue
                if self.repository.fingerprint(module, read) == path.name:
                    found[module] = record["passed"]
                    os.utime(path)
        return found

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return True if self._module(collection_path) in self.left_out else None

    def _module(self, path: Path) -> str:
        return os.path.relpath(path, self.root)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._incomplete |= {self._module(item.path) for item in items}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        reads.record(None)
        for item in session.items:
            module = self._module(item.path)
            self._collected[module] += 1
            if item.get_closest_marker("slow") or module in DECLARED:
                self._slow.add(module)
        if any("::" in argument for argument in self.config.args):
            self._incomplete |= self._slow

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        reads.record(self._sink(self._reads[self._module(item.path)].add))
        try:
            return (yield)
        finally:
            reads.record(None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, object, object]:
        if fixturedef.scope not in _SHARED:
            return (yield)
        before = reads.record(self._sink(self._shared[fixturedef.baseid].add))
        try:
            return (yield)
        finally:
            reads.record(before)

    def _sink(self, add: Callable[[reads.Read], None]) -> Callable[[reads.Read], None]:
        root = str(self.root)

        def sink(read: reads.Read) -> None:
            add(read)
            if read[0] in ("file", "folder") and not read[1][0].startswith(root):
                return
            for reader, has_cache in reads.readers(self.root):
                if has_cache:
                    _once[reader].add(read)

        return sink

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        module = report.nodeid.partition("::")[0]
        if not report.passed:
            self._incomplete.add(module)
        elif report.when == "call":
            self._passed[module] += 1

    @pytest.hookimpl(tryfirst=True)  # Run before a worker sends its output.
    def pytest_sessionfinish(self) -> None:
        found = {
            module: self._reads[module]
            for module in self._reads.keys() & self._slow - self._incomplete
            if self._passed[module] == self._collected[module]
        }
        if not found:
            return
        output = [
            {key: reads.patterns(self.repository, each) for key, each in read.items()}
            for read in (found, self._shared, _once)
        ]
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["tier"] = output
        else:
            self._record(*output)

    def _record(self, found: Patterns, shared: Patterns, once: Patterns) -> None:
        now = Repository(self.root)
        for module, patterns in found.items():
            read = {*patterns}.union(*(shared[each] for each in shared if module.startswith(each)))
            for file in now.inputs(module, ()) & once.keys() - NOT_FOLLOWED:
                read |= {*once[file]}
            if module in DECLARED:
                read = {each for each in read if not each.startswith("?")} | {*DECLARED[module]}
            read = {each.removeprefix("?") for each in read}
            if any(self._changed(each) for each in now.inputs(module, read)):
                continue
            digest = now.fingerprint(module, read)
            record = {"module": module, "passed": self._passed[module], "read": sorted(read)}
            self.folder.mkdir(parents=True, exist_ok=True)
            unfinished = self.folder / f"{digest}.{os.getpid()}"
            unfinished.write_text(json.dumps(record))
            unfinished.replace(self.folder / digest)
        _prune(self.folder)

    def _changed(self, file: str) -> bool:
        """Return whether an input changed since the session began."""
        with contextlib.suppress(FileNotFoundError):
            return (self.root / file).lstat().st_mtime > self._began_s
        return False

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput |= {"left_out": self.left_out}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if output := getattr(node, "workeroutput", {}).get("tier"):
            self._record(*output)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.left_out:
            return
        terminalreporter.section("unchanged since they passed")
        modules: defaultdict[str, list[str]] = defaultdict(list)
        for module in sorted(self.left_out):
            modules[str(Path(module).parent)].append(module)
        for folder, names in modules.items():
            tests = sum(self.left_out[each] for each in names)
            terminalreporter.line(
                f"{tests} tests of {folder} not run: inputs unchanged since they passed (ALL=1 "
                f"runs them): {', '.join(Path(each).stem.removeprefix('test_') for each in names)}"
            )


def _prune(folder: Path) -> None:
    records = sorted(folder.glob("*"), key=lambda each: each.stat().st_mtime)
    for each in records[:-MOST_RECORDS]:
        each.unlink(missing_ok=True)
