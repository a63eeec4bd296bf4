"""Time budgets of the test suites, and a summary at the end of every run.

A suite is a folder below ``tests``, and the modules directly in ``tests`` are one more suite.
pytest fails during collection if a suite has no budget. A suite that exceeds its budget causes only
a warning, because machines differ.
"""

import collections
from pathlib import Path

import pytest

#: Budget of each suite in seconds, summed over all workers. The budgets assume six workers on two
#: cores, with all binaries built.
BUDGETS_S = {
    # Five modules need an API server, so up to five workers start an API server, which takes 6 s.
    "admission": 50,
    "agent": 195,
    "benchmarks": 325,
    "certs": 5,
    "chaos": 120,
    "app": 100,
    "convert": 15,
    "console": 220,
    "contract": 30,
    "controllers": 20,
    "demo": 60,
    # An idle machine takes 631 s, because test_installed.py follows the installation pages for
    # Helm, for kustomize, and for clusters without GPUs.
    "deploy": 660,
    "doctor": 12,
    # An idle machine takes 1,131 s.
    "e2e": 1205,
    "fuzz": 20,
    "gobin": 15,
    "helm": 5,
    "images": 125,
    "install": 185,
    "history": 40,
    "kube": 40,
    "kubectl": 70,
    # An idle machine takes less than 500 s.
    "kubelet": 500,
    "ledger": 35,
    "lying": 20,
    "model": 45,
    "monitoring": 45,
    "nvidia": 40,
    "page": 240,
    "placement": 120,
    "plan": 135,
    "recommend": 5,
    "recorder": 30,
    "release": 90,
    "samples": 5,
    "scheduler": 85,
    "server": 30,
    "soak": 150,
    "standin": 105,
    "tiers": 60,
    "truth": 15,
    "state": 60,
    "modules beside": 65,
}

_took_s: collections.Counter[str] = collections.Counter()


def suite_of(path: str) -> str:
    """Return the suite of a test, given its path or its pytest node ID."""
    below_tests = Path(path.partition("::")[0]).parent.parts[1:]
    return below_tests[0] if below_tests else "modules beside"


def table(took_s: dict[str, float]) -> list[str]:
    """Return a table of the seconds and the budget of each suite, slowest suite first."""
    lines = ["suite           seconds  budget"]
    for suite, seconds in sorted(took_s.items(), key=lambda each: -each[1]):
        budget_s = BUDGETS_S.get(suite, 0)
        over = "  WARNING: over its budget" if suite in BUDGETS_S and seconds > budget_s else ""
        lines.append(f"{suite:<14} {seconds:8.1f} {budget_s:7}{over}")
    return lines


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Modules named check_*.py need no budget, because only their make target runs them.
    suites = {suite_of(item.nodeid) for item in items if item.path.name.startswith("test_")}
    if missing := suites - set(BUDGETS_S):
        raise pytest.UsageError(
            f"no budget in tests/budgets.py for: {', '.join(sorted(missing))}. "
            f'Example: "{min(missing)}": 30'
        )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add the duration of each phase. The setup of a session fixture counts for the suite that uses
    it first.
    """
    _took_s[suite_of(report.nodeid)] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _took_s:
        terminalreporter.section("seconds by suite")
        for line in table(_took_s):
            terminalreporter.line(line)
