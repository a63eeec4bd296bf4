"""The page about the versions of Kubernetes that were tested, from the results of the tests."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from reference.markdown import ROOT, code, head, table
from tests.gobin.build import BESIDE_THE_NEWEST
from tests.gobin.kubernetes import NOT_BUILT, VERSIONS, minor_of

RESULTS = ROOT / "tests/recorded/kubernetes-versions.json"
#: The components that have tests of their own, in the order of the page.
COMPONENTS = ("kube-apiserver", "kube-scheduler", "kubelet")
INTRODUCTION = """\
`make versions` builds the components of each version and runs the tests with real components on
them. kube-controller-manager and kubectl have the version of the API server. A component that
cannot be built is replaced by the component of the newest stable version. kube-scheduler and
kubelet are never newer than the API server, except for a pre-release whose API server cannot be
built. Some tests also run {beside} beside the newest version.

"""

#: Version -> component -> date, number of passed tests, and error of each failed test.
Results = Mapping[str, Mapping[str, Mapping[str, Any]]]


def page() -> str:
    """Return the text of docs/reference/kubernetes-versions.md."""
    results = json.loads(RESULTS.read_text())
    text = head("Versions of Kubernetes", "tests/gobin/kubernetes.py and run `make versions`")
    text += INTRODUCTION.format(beside=", ".join(BESIDE_THE_NEWEST))
    text += table("version | component | date | passed | failed", rows(results))
    failures = [
        (version, code(test), error)
        for version, components in results.items()
        for outcome in components.values()
        for test, error in outcome["failed"].items()
    ]
    if failures:
        text += "## Failed tests\n\n" + table("version | test | error", failures)
    return text.rstrip() + "\n"


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    """Return the row of each component of each version that the tests can build, newest first."""
    for version in VERSIONS:
        for component in COMPONENTS:
            if reason := NOT_BUILT.get(version, {}).get(component):
                yield version, component, "", "", f"not built: {reason}"
            elif outcome := results.get(version, {}).get(component):
                failed = str(len(outcome["failed"]))
                yield version, component, outcome["date"], str(outcome["passed"]), failed
            else:
                yield version, component, "", "", "not run"


def support_row() -> str:
    """Return the row about Kubernetes of README's table: which versions are tested, known from
    documents, and untested.

    A version of a component counts as tested if no test failed.
    """
    results: Results = json.loads(RESULTS.read_text())
    tested = []
    for component in COMPONENTS:
        passed = [
            minor_of(version)
            for version in VERSIONS
            if (outcome := results.get(version, {}).get(component)) and not outcome["failed"]
        ]
        if passed:
            tested.append(f"{component} {', '.join(passed)}")
    table = "docs/reference/kubernetes-versions.md"
    return f"| Kubernetes | {'; '.join(tested)} ([table]({table})) | | all others |"
