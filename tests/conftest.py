"""Fixtures and hooks for all tests."""

import functools
import gc
import os
from collections.abc import Generator, Iterator

import hypothesis
import pytest
import structlog

from tests.controlplane import ControlPlane, built, control_plane
from tests.examples import examples
from tests.forks import Forked
from tests.kubernetes_version import is_at_least
from tests.processes import Processes, starts_processes
from tests.state.validation import violations, watch_states

pytest_plugins = ["tests.budgets"]

# Let test processes cache bytecode, because they import the same sources many times.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Let Go processes use more memory. Otherwise, garbage collection takes an eighth of their CPU.
os.environ.setdefault("GOGC", "400")
os.environ.setdefault("GOMEMLIMIT", "1GiB")
# Let each Go process run on one core, because idle threads that search for work use a fifth of
# their CPU.
os.environ.setdefault("GOMAXPROCS", "1")
# Keep numpy single-threaded, because its second thread spins for 25 ms of CPU when a process
# starts.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Collect garbage less often: with Python's defaults it takes an eighth of the CPU of quick tests.
gc.set_threshold(5_000, 20, 100)

# Format tracebacks without rich, which takes 0.1 s of CPU to show all variables of a traceback.
structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback

# Limit neither the time of an example nor the time to draw it, because both depend on the machine.
# Benchmarks measure time.
hypothesis.settings.register_profile(
    "headroom",
    deadline=None,
    max_examples=examples(250),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("headroom")
watch_states()


@pytest.fixture(scope="session")
@starts_processes
def plane(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """A real API server with the CRD. All tests of the session share it, so use unique object
    names.
    """
    capture = request.config.pluginmanager.getplugin("capturemanager")
    # Show the progress of the build, because the first build takes minutes.
    with capture.global_and_fixture_disabled():
        built("etcd", "kube-apiserver")
    with control_plane() as running:
        yield running


@pytest.fixture(autouse=True)
def reset_logging() -> Iterator[None]:
    """Reset structlog after each test.

    A command that a test calls in this process configures structlog to write to the test's stderr,
    which pytest closes when the test ends.
    """
    yield
    if structlog.is_configured():
        structlog.reset_defaults()


@pytest.fixture(autouse=True)
def valid_states() -> Iterator[None]:
    """Check the invariants of every state object that still exists in this process."""
    yield
    assert violations() == []


#: Tests that may be skipped in CI. Maps the ID of each test to the reason.
SKIPS_ALLOWED = {
    "tests/demo/test_trace.py::test_the_built_in_figures_equal_the_trace": (
        "needs the research trace, which stays out of the repository and of a plain clone"
    ),
    "tests/benchmarks/test_packing.py::test_reference_results_are_reproduced_on_a_small_cluster": (
        "needs the same trace; other tests compare the rules with their definitions"
    ),
}


#: Modules that start first, in this order. They take longest, and starting them early lets all
#: workers end at about the same time.
LONGEST_FIRST = (
    "tests/deploy/test_installed.py",
    "tests/install/",
    "tests/images/",
    "tests/deploy/test_gitops.py",
    "tests/benchmarks/test_gpu.py",
    "tests/kubelet/test_node.py",
    "tests/kubelet/test_steering.py",
    "tests/standin/test_conformance.py",
    "tests/soak/",
    # These modules follow each other, so that each worker starts their API server only once.
    "tests/e2e/test_real_nodes.py",
    "tests/e2e/test_gated.py",
    "tests/e2e/test_churn.py",
    "tests/e2e/test_placing.py",
    "tests/e2e/",
    "tests/kubelet/",
    "tests/nvidia/",
    "tests/agent/test_faults.py",
    "tests/standin/",
    "tests/deploy/",
    "tests/model/",
    "tests/scheduler/test_recorded_requests.py",
)


@functools.cache
def start_order(module: str) -> int:
    """Return the index of the module in ``LONGEST_FIRST``, or its length."""
    found = (i for i, path in enumerate(LONGEST_FIRST) if module.startswith(path))
    return next(found, len(LONGEST_FIRST))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reversed",
        action="store_true",
        help="run all tests in reverse order: no test may depend on earlier ones",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude modules and tests from garbage collection, because they live until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # after pytest has sorted the tests by fixtures
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("reversed"):
        items.reverse()
    later = [item for item in items if not exists_yet(item)]
    config.hook.pytest_deselected(items=later)
    items[:] = [item for item in items if item not in set(later)]
    items.sort(key=lambda item: start_order(item.nodeid.partition("::")[0]))


def exists_yet(item: pytest.Item) -> bool:
    """Return whether the Kubernetes version under test has the feature that the test needs."""
    since = item.get_closest_marker("since")
    return since is None or is_at_least(*since.args)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests as slow if their fixtures start processes, before ``-m`` selects by marks."""
    if isinstance(item, pytest.Function) and any(
        hasattr(fixtures[-1].func, "starts_processes")  # the last definition overrides the others
        for fixtures in item._fixtureinfo.name2fixturedefs.values()
    ):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let only slow tests start servers, because `make check` must remain quick."""
    if item.get_closest_marker("slow"):
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Processes, "spawn", _no_process)
        patch.setattr(Forked, "__init__", _no_process)
        return (yield)


def _no_process(*_: object, **__: object) -> None:
    pytest.fail("a quick test started a server: mark it, or its fixture, as slow", pytrace=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a skipped test as failed in CI, unless ``SKIPS_ALLOWED`` contains the test."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and item.nodeid not in SKIPS_ALLOWED:
        report.outcome = "failed"
        report.longrepr = f"skipped under CI=true: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the values that tests recorded as the property "measured"."""
    lines = [
        f"{report.nodeid.rpartition('::')[2]}: {text}"
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, text in report.user_properties
        if name == "measured"
    ]
    if lines:
        terminalreporter.section("measured end to end")
        for line in lines:
            terminalreporter.write_line(line)
