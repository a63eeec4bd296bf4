"""Runs the agent on the fake driver library, which is rebuilt only if its source changes."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from agent.kube_client import of_client
from agent.kube_publisher import KubernetesPublisher
from agent.probes.driver_limits_probe import LimitsProbe
from agent.probes.nvml import Gate
from agent.status_writer import StatusWriter
from tests import forks
from tests.agent.host import Tree
from tests.agent.installed_agent import installed
from tests.agent.limited import UIDS, library
from tests.agent.nvml_library import PROBES
from tests.agent.scripted import ApiServer
from tests.agent.whole import Whole
from tests.agent.writing import Clock
from tests.driver import AGENT_PATH, GIB, Driver, Gpu, h100, library_folder
from tests.processes import starts_processes
from tests.waiting import PATIENCE_S, until

__all__ = ["installed"]


@pytest.fixture(scope="session")
def driver_folder() -> Path:
    """Return a folder with libnvidia-ml.so.1, for LD_LIBRARY_PATH."""
    return library_folder()


@pytest.fixture
def environment(driver_folder: Path, tmp_path: Path) -> dict[str, str]:
    """Return the environment of an agent process. The file that FAKE_NVML_TABLE names does not
    exist yet.
    """
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    # Use a separate /proc, because other kubelets and plugins may run on this machine.
    (tmp_path / "proc/2").mkdir(parents=True)
    (tmp_path / "proc/2/comm").write_text("kthreadd\n")
    (device := tmp_path / "nvidia0").touch()
    return kept | {
        "HEADROOM_PROC": str(tmp_path / "proc"),
        "LD_LIBRARY_PATH": str(driver_folder),
        "FAKE_NVML_TABLE": str(tmp_path / "table"),
        "FAKE_NVML_DEVICE": str(device),
        "PYTHONPATH": AGENT_PATH,
        "PYTHONWARNINGS": "error",
        "NODE_NAME": "n1",
    }


@pytest.fixture
@starts_processes
def report(environment: dict[str, str]) -> Callable[..., dict[str, Any]]:
    """Return a function that runs the agent once on a device table and returns the status that the
    agent prints.
    """

    def run(table: str, *flags: str) -> dict[str, Any]:
        Path(environment["FAKE_NVML_TABLE"]).write_text(table)
        command = ("agent", "--once", "--json", "--pause", "0", *flags)
        done = forks.run(*command, env=environment)
        assert done.returncode in (0, 1), done.stderr  # 1 means that the report has a fault.
        status: dict[str, Any] = json.loads(done.stdout)
        return status

    return run


class Survey:
    """Takes the agent's samples in a separate process, on a driver that a test controls."""

    def __init__(
        self, driver: Driver, environment: dict[str, str], *flags: str, fork: bool
    ) -> None:
        self.driver = driver
        output, theirs = forks.pipe()
        their_input, ours = forks.pipe()
        self._process: subprocess.Popen[bytes] | forks.Forked
        if fork:
            log = Path(environment["FAKE_NVML_TABLE"]).with_name("stepper.log")
            parameters = (flags, log, environment, theirs, their_input)
            self._process = forks.Forked("tests.agent.stepper", *parameters)
        else:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.agent.stepper", *flags],
                env=environment,
                stdin=their_input.fileno(),
                stdout=theirs.fileno(),
            )
        theirs.close()
        their_input.close()
        self._commands = os.fdopen(os.dup(ours.fileno()), "w")
        self._answers = os.fdopen(os.dup(output.fileno()))

    def step(self) -> dict[str, Any]:
        """Take a sample and return its status."""
        return self.ask("step")

    def until(
        self, right: Callable[[dict[str, Any]], bool], within_s: float = PATIENCE_S
    ) -> dict[str, Any]:
        """Take samples until ``right`` accepts a status, because other threads of the agent deliver
        results late.
        """
        seen: list[dict[str, Any]] = [{}]

        def is_right() -> bool:
            seen[0] = self.step()
            return right(seen[0])

        until(is_right, "the expected status", within_s, logs=lambda: str(seen))
        return seen[0]

    def ask(self, command: str) -> dict[str, Any]:
        self._commands.write(command + "\n")
        self._commands.flush()
        answer: dict[str, Any] = json.loads(self._answers.readline())
        return answer

    def end(self) -> None:
        """Kill the process, which works even if a driver call hangs."""
        self._process.kill()
        self._process.wait()
        self._commands.close()
        self._answers.close()


@pytest.fixture
@starts_processes
def survey(environment: dict[str, str]) -> Iterator[Callable[..., Survey]]:
    """Return a function that starts a survey of GPUs. With ``driver``, the survey uses an existing
    driver.

    A forked survey finds the driver library only if it exists when the survey starts.
    """
    started: list[Survey] = []

    def start(on: list[Gpu] | Driver, *flags: str, fork: bool = True) -> Survey:
        table = Path(environment["FAKE_NVML_TABLE"])
        driver = on if isinstance(on, Driver) else Driver(table, on)
        started.append(Survey(driver, environment, *flags, fork=fork))
        return started[-1]

    yield start
    for each in started:
        each.end()


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "proc")


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer.serving() as state:
        yield state


@pytest.fixture
def publisher(api: ApiServer) -> Iterator[KubernetesPublisher]:
    configuration = client.Configuration(host=api.url)
    configuration.api_key = {"authorization": "Bearer secret"}
    configuration.no_proxy = "*"
    with client.ApiClient(configuration) as kube:
        yield KubernetesPublisher(of_client(kube), "n1", "headroom-system", heartbeat_s=30)
        kube.rest_client.pool_manager.clear()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def status_writer(publisher: KubernetesPublisher, clock: Clock) -> StatusWriter:
    return StatusWriter(publisher, 30.0, clock.monotonic, clock.now, random.Random(1))


@pytest.fixture
def threads_end() -> Iterator[None]:
    yield
    while PROBES:
        PROBES.pop().close()


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[Whole]:
    """A node with three pods on one device."""
    built = Whole(tmp_path, [h100("GPU-a")], 4)
    for uid, name in zip(UIDS, ("limited", "counted", "neither"), strict=False):
        built.run(uid, name, GIB)
    yield built
    built.stop()


@pytest.fixture
def probe(tmp_path: Path) -> Iterator[Callable[..., LimitsProbe]]:
    """Return a function that starts a probe on a driver with the given answer. The probe's root
    folder has no cgroups yet.
    """
    started: list[LimitsProbe] = []
    (tmp_path / "cgroup.controllers").touch()

    def start(limits: Callable[..., None], deadline_s: float = 30.0) -> LimitsProbe:
        started.append(LimitsProbe(Gate(library(limits)), deadline_s, tmp_path))
        return started[-1]

    yield start
    for each in started:
        each.close()
