"""What every folder of tests may ask for."""

import os
from collections.abc import Generator, Iterator

import hypothesis
import pytest
import structlog

from tests.controlplane import ControlPlane, built, control_plane

pytest_plugins = ["tests.budgets"]

# What tests start imports the same sources over and over: it may keep them compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Nor need etcd, API servers and kubelets be sparing with memory: an eighth of their CPU goes there.
os.environ.setdefault("GOGC", "400")
os.environ.setdefault("GOMEMLIMIT", "1GiB")

# How long an example takes says something of the machine; benchmarks are where time is judged.
hypothesis.settings.register_profile("headroom", deadline=None)
hypothesis.settings.load_profile("headroom")


@pytest.fixture(scope="session")
def plane(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """A real API server with the CRD, shared by the session: use names of your own in it."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():  # the first build takes minutes and says so
        built("etcd", "kube-apiserver")
    with control_plane() as running:
        yield running


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """A command line that a test calls within its process sends all logs to that test's stderr,
    which is closed when it ends."""
    yield
    if structlog.is_configured():
        structlog.reset_defaults()


#: Where a skip is no failure although CI is true: test id -> why.
SKIPS_ALLOWED = {
    "tests/demo/test_trace.py::test_the_built_in_figures_are_those_of_the_trace": (
        "needs the research trace, which stays out of the repository and of a plain clone"
    ),
    "tests/benchmarks/test_packing.py::test_reference_results_come_out_on_the_small_cluster": (
        "needs the same trace; the rules are held against their definitions without it"
    ),
}


#: Fixtures that start processes, and modules that take long: `make check` leaves them out.
SLOW_FIXTURES = {"plane", "server"}
SLOW_MODULES = (
    "tests/agent/test_faults",
    "tests/agent/test_gate_service",
    "tests/agent/test_on_driver_library",
    "tests/agent/test_status_writer",
    "tests/agent/test_device_probe",
    "tests/agent/test_once_report",
    "tests/agent/test_xids",
    "tests/benchmarks/test_gpu.py",
    "tests/chaos/test_chaos",
    "tests/demo/test_demo",
    "tests/deploy/",
    "tests/e2e/",
    "tests/helm/",
    "tests/install/",
    "tests/history/test_real_prometheus",
    "tests/kubelet/",
    "tests/model/",
    "tests/monitoring/test_metrics",
    "tests/monitoring/test_real_prometheus",
    "tests/nvidia/",
    "tests/placement/test_agreement",
    "tests/test_cli",
    "tests/test_controlplane",
    "tests/app/test_injected",
    "tests/test_dockerfile",
    "tests/test_tls",
)


#: Begun first, in this order, so that all workers end at about the same time: nobody is left alone
#: with a long one.
LONGEST_FIRST = (
    "tests/kubelet/test_agent.py",
    "tests/e2e/test_real_nodes.py",
    "tests/install/",
    "tests/kubelet/test_node.py",
    "tests/e2e/test_gated.py",
    "tests/e2e/test_churn.py",
    "tests/e2e/test_placing.py",
    "tests/kubelet/test_steering.py",
    "tests/standin/test_conformance.py",
    "tests/deploy/test_installed.py",
    "tests/e2e/",
    "tests/kubelet/",
    "tests/nvidia/",
    "tests/agent/test_faults.py",
    "tests/standin/",
    "tests/benchmarks/test_gpu.py",
    "tests/model/",
    "tests/scheduler/test_recorded_requests.py",
    "tests/test_dockerfile.py",
)


def how_late(item: pytest.Item) -> int:
    """Where its module stands among those that are begun first."""
    found = (i for i, path in enumerate(LONGEST_FIRST) if item.nodeid.startswith(path))
    return next(found, len(LONGEST_FIRST))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reversed",
        action="store_true",
        help="run the tests of each module in reverse: none may depend on those before it",
    )


@pytest.hookimpl(trylast=True)  # pytest sorts by fixtures
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("reversed"):
        items.reverse()
    items.sort(key=how_late)
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & SLOW_FIXTURES or item.nodeid.startswith(SLOW_MODULES):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under CI a skip hides a hole, so it is a failure."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and item.nodeid not in SKIPS_ALLOWED:
        report.outcome = "failed"
        report.longrepr = f"skipped under CI=true: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests measured end to end, whichever process they ran in."""
    told = [
        f"{report.nodeid.rpartition('::')[2]}: {text}"
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, text in report.user_properties
        if name == "measured"
    ]
    if told:
        terminalreporter.section("measured end to end")
        for line in told:
            terminalreporter.write_line(line)
