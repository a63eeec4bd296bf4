"""Runs the tests of real components on each minor version of Kubernetes, and records the results.

    python -m tests.versions [MINOR ...] [--workers N]    by default all minors
    python -m tests.versions --report report.xml MINOR    results of `make test`

New results of a component replace its earlier results in tests/recorded/kubernetes-versions.json.
`make docs` generates docs/reference/kubernetes-versions.md from this file.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.gobin.build import say
from tests.gobin.kubernetes import VERSIONS, built_components, minor_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests/recorded/kubernetes-versions.json"
#: The tests of each component. They also start other components.
SUITES = {
    "kube-apiserver": (
        "tests/admission",
        "tests/deploy/test_installed.py",
        "tests/kube",
        "tests/ledger",
    ),
    "kube-scheduler": ("tests/e2e",),
    "kubelet": ("tests/kubelet",),
}
#: Maximum number of characters that are recorded of a failed test's error message.
ERROR_MAX = 300


def main() -> int:
    minors = {minor_of(version): version for version in VERSIONS}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("minors", nargs="*", metavar="MINOR", help=", ".join(minors))
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--report", type=Path, help="JUnit report of a run on the only MINOR")
    args = parser.parse_args()
    if unknown := set(args.minors) - set(minors):
        parser.error(f"no such minor: {', '.join(sorted(unknown))}; there are {', '.join(minors)}")
    if args.report and len(args.minors) != 1:
        parser.error("--report needs one MINOR. Example: --report report.xml 1.37")
    failed = 0
    for minor in args.minors or minors:
        tested = [name for name in SUITES if name in built_components(minors[minor])]
        report = args.report.read_text() if args.report else run(minor, tested, args.workers)
        for component in tested:
            outcome = outcome_of(report, SUITES[component])
            if not (outcome["passed"] or outcome["failed"]):
                continue  # The report has no result of this component.
            record(minors[minor], component, outcome)
            failed += len(outcome["failed"])
            counts = f"{outcome['passed']} passed, {len(outcome['failed'])} failed"
            say(f"Kubernetes {minors[minor]}, {component}: {counts}")
    return 1 if failed else 0


def run(minor: str, components: Iterable[str], workers: int) -> str:
    """Run the tests of components on a minor version and return the JUnit report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-n", str(workers)]
        command += ["--dist", "loadfile", "--no-loadscope-reorder"]
        command += [test for component in components for test in SUITES[component]]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"TEST_KUBERNETES": minor}, check=False)
        if not report.exists():
            raise SystemExit(f"pytest wrote no report for Kubernetes {minor}: see its output above")
        return report.read_text()


def outcome_of(report: str, tests: Sequence[str]) -> dict[str, Any]:
    """Return the date, the number of passed tests and the error of each failed test from a JUnit
    report. ``tests`` are the test files and folders to include.
    """
    passed = 0
    failed: dict[str, str] = {}
    for case in ET.fromstring(report).iter("testcase"):
        module = f"{case.get('classname', '').replace('.', '/')}.py"
        if not any(module == each or module.startswith(f"{each}/") for each in tests):
            continue
        problems = [case.find("failure"), case.find("error")]
        error = next((each for each in problems if each is not None), None)
        if error is not None:
            message = (error.get("message") or "").partition("\n")[0]
            failed[f"{module}::{case.get('name')}"] = message[:ERROR_MAX]
        elif case.find("skipped") is None:
            passed += 1
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": day, "passed": passed, "failed": failed}


def record(version: str, component: str, outcome: dict[str, Any]) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results.setdefault(version, {})[component] = outcome
    newest_first = {each: results[each] for each in VERSIONS if each in results}
    RESULTS.write_text(json.dumps(newest_first, indent=2) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
