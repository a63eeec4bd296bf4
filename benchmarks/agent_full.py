"""Measures the agent on the fullest node: 16 GPUs, 768 pods and 8,000 processes.

    python -m benchmarks.agent --full [--seconds 60] [--samples 17280] [--python PATH]

Each GPU has 48 replicas and 500 processes: ten for each pod, and twenty that belong to no pod.
Three agents run one after the other on the same node:

* quiet: nothing changes. This is the baseline of the machine.
* arriving: every half second, one pod ends and another starts. Each change rewrites the kubelet's
  checkpoint, and the agent samples at most that often.
* a day: the same, but each sample moves the agent's clocks on by 5 s, for 17,280 samples.

The benchmark measures CPU time instead of elapsed time, so other load on the machine has little
influence. The goals are less than 3 % of one core while pods arrive, and less than 80 MiB resident
over the day.
"""

import contextlib
import http.client
import itertools
import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.agent import Scraper, agent, api_server, scraped
from benchmarks.vitals import Vitals, vitals
from tests.agent.scripted import ApiServer
from tests.agent.whole import Whole
from tests.driver import Gpu

GPUS, REPLICAS, PROCESSES = 16, 48, 500
PODS = GPUS * REPLICAS
PROCESSES_OF_A_POD = 10
#: Number of processes on each GPU that belong to no pod.
STRANGERS = PROCESSES - REPLICAS * PROCESSES_OF_A_POD
TAKES_BYTES = 1500 << 20
ARRIVES_EVERY_S = 0.5
INTERVAL_S = 5.0
DAY_SAMPLES = int(86_400 / INTERVAL_S)
MOST_RESIDENT_MIB, MOST_CORE_RATIO = 80.0, 0.03
#: Number of samples after which imports are done and caches are filled.
SETTLED_SAMPLES = 8
MOST_FAILURES = 30


@dataclass
class Crowd:
    """The pods of a node. ``replace`` replaces the oldest pod by a new one."""

    whole: Whole
    api: ApiServer
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _uids: list[str] = field(default_factory=list)
    _pids: dict[str, list[int]] = field(default_factory=dict)
    _pid: Iterator[int] = field(default_factory=lambda: itertools.count(1_000_000))

    def fill(self) -> None:
        with self.whole.driver.batch():
            for gpu in self.whole.driver.gpus:
                for _ in range(STRANGERS):
                    pid = next(self._pid)
                    self.whole.process(pid, "python", "/user.slice/session.scope")
                    self.whole.driver.use(pid, {gpu.uuid: 16 << 20})
            for _ in range(PODS):
                self._start()

    def replace(self) -> None:
        """End the oldest pod and its processes, and start a new pod."""
        with self.whole.driver.batch():
            uid = self._uids.pop(0)
            for pid in self._pids.pop(uid):
                self.whole.driver.use(pid, {})
                self.whole.end_process(pid)
            with self.whole.node.lock:
                first = self.whole.node.processes[uid, "main"].pid
                self.whole.node.delete(uid)
            self.whole.end_process(first)
            self._start()
        self.api.requests.clear()  # each report has hundreds of kilobytes

    def _start(self) -> None:
        number = next(self._numbers)
        uid = f"{number:08x}-1111-4222-8333-{number:012x}"
        with self.whole.node.lock:
            device = self.whole.run(uid, f"llm-server-{number}", TAKES_BYTES // 2)
        others = [next(self._pid) for _ in range(PROCESSES_OF_A_POD - 1)]
        cgroup = f"/{self.whole.cgroup(uid).relative_to(self.whole.cgroups)}"
        for pid in others:
            self.whole.process(pid, "python", cgroup)
            self.whole.driver.use(pid, {device: TAKES_BYTES // 2 // len(others)})
        self._uids.append(uid)
        self._pids[uid] = others


@contextlib.contextmanager
def arriving(crowd: Crowd, every_s: float) -> Iterator[None]:
    """Replace the oldest pod every ``every_s`` seconds while the context lasts."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(every_s):
            crowd.replace()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@dataclass(frozen=True, slots=True)
class Cost:
    core_ratio: float
    p50_s: float
    p99_s: float
    samples: float


def settled(scraper: Scraper, samples: int) -> None:
    """Wait for ``samples`` samples. If its clocks run ahead, the agent mistakes some clients for
    slow clients and disconnects them. If this happens ``MOST_FAILURES`` times in a row, the agent
    ended."""
    failures = 0
    while True:
        try:
            if scraped(scraper, "headroom_hurried_cycles") >= samples:
                return
            failures = 0
        except (OSError, http.client.HTTPException):
            failures += 1
            if failures == MOST_FAILURES:
                raise
        time.sleep(1.0)


def steady(python: str, whole: Whole, api: ApiServer, seconds: float) -> Cost:
    """Measure what an agent costs in normal operation, after its caches are filled."""
    with agent(python, whole, api, "real") as (pid, scraper):
        settled(scraper, SETTLED_SAMPLES)
        before, samples = vitals(pid), scraped(scraper, "headroom_hurried_cycles")
        time.sleep(seconds)
        after = vitals(pid)  # without scrapes, which are not part of a sample
        return Cost(
            (after.cpu_s - before.cpu_s) / (after.at_s - before.at_s),
            scraped(scraper, "headroom_hurried_cpu_p50"),
            scraped(scraper, "headroom_hurried_cpu_p99"),
            scraped(scraper, "headroom_hurried_cycles") - samples,
        )


def day(python: str, whole: Whole, api: ApiServer, samples: int) -> list[Vitals]:
    """Return the vitals at the start and after each quarter of ``samples``."""
    with agent(python, whole, api, "accelerated") as (pid, scraper):
        settled(scraper, SETTLED_SAMPLES)
        found = [vitals(pid)]
        for quarter in range(1, 5):
            settled(scraper, SETTLED_SAMPLES + samples * quarter // 4)
            found.append(vitals(pid))
        return found


def main(python: str, seconds: float, samples: int) -> int:
    with tempfile.TemporaryDirectory(prefix="headroom-agent-") as folder:
        gpus = [Gpu(f"GPU-{index:08x}-8d4e-4f5a-9b6c-7d8e9f0a1b2c") for index in range(GPUS)]
        whole = Whole(Path(folder), gpus, REPLICAS)
        try:
            with api_server(Path(folder)) as api:
                crowd = Crowd(whole, api)
                crowd.fill()
                return measure(python, whole, api, crowd, seconds, samples)
        finally:
            whole.stop()


def measure(
    python: str, whole: Whole, api: ApiServer, crowd: Crowd, seconds: float, samples: int
) -> int:
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    _say(f"{GPUS} GPUs, {PODS} pods, {GPUS * PROCESSES} processes; {machine}")
    quiet = steady(python, whole, api, seconds)
    _say(_line("quiet", quiet))
    with arriving(crowd, ARRIVES_EVERY_S):
        busy = steady(python, whole, api, seconds)
        _say(_line("pods arriving", busy))
        _say(f"pods arriving cost {busy.core_ratio / quiet.core_ratio:.2f} times the quiet node")
        met = [_goal("core", f"{busy.core_ratio:.2%}", "< 3 %", busy.core_ratio < MOST_CORE_RATIO)]
        lives = day(python, whole, api, samples) if samples else []
    if lives:
        resident = " -> ".join(f"{each.resident_mib:.1f}" for each in lives)
        _say(f"{samples} samples, {samples * INTERVAL_S / 3600:.1f} h: {resident} MiB resident")
        peak_mib = lives[-1].peak_mib
        met.append(_goal("peak", f"{peak_mib:.1f} MiB", "< 80 MiB", peak_mib < MOST_RESIDENT_MIB))
    return 0 if all(met) else 1


def _line(name: str, cost: Cost) -> str:
    return (
        f"{name:<14} {cost.core_ratio:7.2%} of a core; {cost.samples:.0f} samples, CPU of each:"
        f" p50 {cost.p50_s * 1000:.0f} ms, p99 {cost.p99_s * 1000:.0f} ms"
    )


def _goal(what: str, figure: str, goal: str, met: bool) -> bool:
    _say(f"{what:<8}{figure:>12}  {goal:<9} {'met' if met else 'NOT MET'}")
    return met


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201
