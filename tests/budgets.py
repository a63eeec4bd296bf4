"""CPU budgets of the test suites, and a summary at the end of every run.

A suite is a folder below ``tests``, and the modules directly in ``tests`` are one more suite.
pytest fails during collection if a suite has no budget. A suite that exceeds its budget causes only
a warning, because machines differ.

The budgets are CPU seconds of the test process and of all processes that it starts. Unlike the
duration of a suite, they hardly depend on what else runs on the machine.
"""

import collections
import contextlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

#: Budget of each suite in CPU seconds, with all binaries built. Measured on two busy cores (load
#: 20), where the same work takes about half more CPU than on an idle machine, and rounded up. The
#: suites that start first have 10 s more, because each worker collects all tests.
BUDGETS_S = {
    # An idle machine takes 337 and 80 s. These are half more.
    "e2e": 505,
    "page": 120,
    # Half of the tests of the soak run only if the soak changed.
    "soak": 155,
    "admission": 25,
    "agent": 85,
    "app": 20,
    "benchmarks": 70,
    "certs": 5,
    "chaos": 50,
    "console": 45,
    "contract": 10,
    "controllers": 10,
    "convert": 5,
    "demo": 20,
    "deploy": 275,
    "doctor": 10,
    # An estimate: tests failed while it was measured.
    "fuzz": 20,
    "gobin": 5,
    "helm": 5,
    "history": 10,
    "images": 65,
    "install": 160,
    "kube": 15,
    "kubectl": 25,
    "kubelet": 155,
    "ledger": 15,
    "lying": 5,
    "model": 25,
    "modules beside": 30,
    "monitoring": 15,
    "nvidia": 10,
    "placement": 30,
    "plan": 80,
    "recommend": 5,
    "recorder": 20,
    "release": 35,
    "samples": 5,
    "scheduler": 40,
    "server": 20,
    "standin": 40,
    "state": 30,
    "tiers": 25,
    "truth": 5,
}

_used_s: collections.Counter[str] = collections.Counter()
#: Name of the property that sends the CPU seconds of a module from a worker to its session.
_PROPERTY = "cpu_s"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def suite_of(path: str) -> str:
    """Return the suite of a test, given its path or its pytest node ID."""
    below_tests = Path(path.partition("::")[0]).parent.parts[1:]
    return below_tests[0] if below_tests else "modules beside"


def table(used_s: dict[str, float]) -> list[str]:
    """Return a table of the CPU seconds and the budget of each suite, most expensive suite
    first.
    """
    lines = ["suite             CPU s  budget"]
    for suite, seconds in sorted(used_s.items(), key=lambda each: -each[1]):
        budget_s = BUDGETS_S.get(suite, 0)
        over = "  WARNING: over its budget" if suite in BUDGETS_S and seconds > budget_s else ""
        lines.append(f"{suite:<14} {seconds:8.1f} {budget_s:7}{over}")
    return lines


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, of its descendants, and of ended descendants."""
    total = 0.0
    with contextlib.suppress(OSError):  # The process has ended.
        # The name of the process, which ends with the last parenthesis, can contain spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, fields[11:15])) / _TICKS_PER_S
        total += sum(map(cpu_s, _children(pid)))
    return total


def _children(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            yield from map(int, (thread / "children").read_text().split())


class Meter:
    """The CPU seconds of this process since its start or the end of the last module."""

    def __init__(self) -> None:
        self._read_s = 0.0
        self._is_last = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        self._is_last = nextitem is None or nextitem.path != item.path
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when == "teardown" and self._is_last:
            now_s = cpu_s(os.getpid())
            item.user_properties.append((_PROPERTY, max(0.0, now_s - self._read_s)))
            self._read_s = now_s


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Meter(), "meter")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Modules named check_*.py need no budget, because only their make target runs them.
    suites = {suite_of(item.nodeid) for item in items if item.path.name.startswith("test_")}
    if missing := suites - set(BUDGETS_S):
        raise pytest.UsageError(
            f"no budget in tests/budgets.py for: {', '.join(sorted(missing))}. "
            f'Example: "{min(missing)}": 30'
        )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add the CPU of each module. The start of the session and the setup of a session fixture count
    for the suite that runs first.
    """
    if report.when == "teardown":
        used = (used_s for name, used_s in report.user_properties if name == _PROPERTY)
        _used_s[suite_of(report.nodeid)] += sum(used)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _used_s:
        terminalreporter.section("CPU seconds by suite")
        for line in table(_used_s):
            terminalreporter.line(line)
