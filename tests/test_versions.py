"""Tests how test results on each Kubernetes version are recorded and shown."""

import pytest

from reference import kubernetes_versions
from tests import kubernetes_version
from tests.controlplane import ROOT
from tests.versions import outcome_of

REPORT = """<testsuites><testsuite>
<testcase classname="tests.e2e.test_a" name="test_passes" />
<testcase classname="tests.e2e.test_a" name="test_is_skipped"><skipped message="no" /></testcase>
<testcase classname="tests.e2e.test_a" name="test_fails[1]">
  <failure message="not bound&#10;more" />
</testcase>
<testcase classname="tests.e2e.test_b" name="test_breaks">
  <error message="no API server" />
</testcase>
</testsuite></testsuites>"""


def test_failures_and_errors_are_recorded_with_their_first_line() -> None:
    outcome = outcome_of(REPORT, ["tests/e2e"])
    assert outcome["passed"] == 1
    assert outcome["failed"] == {
        "tests/e2e/test_a.py::test_fails[1]": "not bound",
        "tests/e2e/test_b.py::test_breaks": "no API server",
    }


def test_the_readme_lists_the_versions_on_which_all_tests_passed() -> None:
    assert kubernetes_versions.support_row() in (ROOT / "README.md").read_text().splitlines()


def test_a_version_counts_as_tested_only_if_no_test_failed() -> None:
    results = {
        "1.37.2": {"kubelet": {"date": "2026-11-28", "passed": 40, "failed": {}}},
        "1.36.3": {"kubelet": {"date": "2026-11-28", "passed": 39, "failed": {"a.py::b": "c"}}},
    }
    rows = list(kubernetes_versions.rows(results))
    assert ("1.37.2", "kubelet", "2026-11-28", "40", "0") in rows
    assert ("1.36.3", "kubelet", "2026-11-28", "39", "1") in rows
    assert ("1.37.2", "kube-scheduler", "", "", "not run") in rows
    assert [row[4] for row in rows if row[:2] == ("1.38.0-beta.0", "kubelet")] == [
        "not built: the Go module proxy does not serve sigs.k8s.io/iptables-wrappers v1.0.0 (403)"
    ]


@pytest.mark.parametrize(
    ("name", "minor", "expected"),
    [
        pytest.param("kubelet", "1.37", "kubelet", id="the newest"),
        pytest.param("kubelet", "1.36", "kubelet-1.36", id="an older minor"),
        pytest.param("kubelet", "1.38", "kubelet", id="not built for the pre-release"),
        pytest.param("kube-scheduler", "1.38", "kube-scheduler-1.38", id="the pre-release"),
        pytest.param("kube-scheduler-1.34", "1.36", "kube-scheduler-1.34", id="named with a minor"),
        pytest.param("etcd", "1.36", "etcd", id="not of Kubernetes"),
    ],
)
def test_a_component_without_a_version_is_that_of_the_minor_under_test(
    name: str, minor: str, expected: str
) -> None:
    assert kubernetes_version.of_version(name, minor) == expected
