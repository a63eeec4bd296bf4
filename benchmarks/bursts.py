"""Measures how much of short bursts of memory the agent's peaks show, at several intervals.

    python -m benchmarks.bursts [--seconds 300] [--seed 1]

The node has 8 GPUs on the fake driver library, and 96 pods. Each pod uses 1 GiB, then up to 5 GiB
more for 0.1 to 5 s, then 1 GiB again. Then its container restarts. In half of the pods, the burst
begins and ends abruptly. In the others, it grows to its height and shrinks again, like the memory
of an allocator. Agents with intervals of 5, 1 and 0.5 s sample this node at the same time, in real
time. (The flag ``--interval`` of the agent allows at least 1 s.)

A burst is *seen* if the peak of that life is at least 64 MiB above the 1 GiB. Its *height* is the
ratio of the additional memory that the peak shows, or 0 if the burst is not seen.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from agent import __main__ as agent
from agent.logs import log_to_stderr
from agent.sampler import Sampler, device_probe_of
from agent.settings import read_settings
from tests.agent.whole import Whole
from tests.driver import GIB, Gpu

ROOT = Path(__file__).parents[1]
GPUS, PODS_OF_A_GPU = 8, 12
INTERVALS_S = (5.0, 1.0, 0.5)
DURATIONS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SHAPES = ("at once", "growing")
BASE_BYTES, HEIGHT_BYTES = GIB, 5 * GIB
SEEN_BYTES = 64 << 20
#: Number of steps in which a growing burst grows and shrinks.
STEPS = 20
#: Seconds before and after a burst in which every agent takes a sample.
AROUND_S = 6.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Burst:
    uid: str
    duration_s: float
    shape: str
    #: When its container started, in seconds of the clock.
    started_at_s: float
    #: Interval of an agent -> the largest peak that the agent reported.
    peaks: dict[float, int] = field(default_factory=dict)


@dataclass
class Played:
    """The bursts of all pods. The threads of the pods append to it."""

    whole: Whole
    bursts: list[Burst] = field(default_factory=list)
    pids: Iterator[int] = field(default_factory=lambda: itertools.count(500_000))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def play(self, number: int, uid: str, device: str, stop: threading.Event, seed: str) -> None:
        """Play the bursts of one pod until ``stop`` is set."""
        chance = random.Random(seed)
        shape = SHAPES[number % 2]
        durations = itertools.cycle(DURATIONS_S)
        for _ in range(number // 2 % len(DURATIONS_S)):
            next(durations)
        while not stop.wait(chance.uniform(0, AROUND_S)):
            burst = Burst(uid, next(durations), shape, time.time())
            pid = self._start(uid)
            self.whole.driver.use(pid, {device: BASE_BYTES})
            time.sleep(AROUND_S + chance.uniform(0, AROUND_S))
            began_s = time.monotonic()
            while (age_s := time.monotonic() - began_s) < burst.duration_s:
                self.whole.driver.use(pid, {device: BASE_BYTES + height(burst, age_s)})
                step_s = burst.duration_s / (1 if burst.shape == SHAPES[0] else STEPS)
                time.sleep(max(0.0, min(step_s, began_s + burst.duration_s - time.monotonic())))
            self.whole.driver.use(pid, {device: BASE_BYTES})
            time.sleep(AROUND_S)
            self.whole.driver.use(pid, {})
            self.whole.end_process(pid)
            with self.lock:
                self.bursts.append(burst)

    def _start(self, uid: str) -> int:
        """Start a process in a new container of the pod. Return its pid."""
        with self.lock:
            pid = next(self.pids)
        pod = self.whole.cgroup(uid).parent.relative_to(self.whole.cgroups)
        folder = self.whole.process(pid, "python", f"/{pod}/cri-containerd-{pid:064x}.scope")
        ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS_PER_S)
        (folder / "stat").write_text(f"{pid} (python) S 1 " + "1 " * 17 + f"{ticks} 1 1")
        return pid


def height(burst: Burst, age_s: float) -> int:
    """Return the bytes above the base, ``age_s`` seconds after the burst began."""
    if burst.shape == SHAPES[0]:
        return HEIGHT_BYTES
    return round(HEIGHT_BYTES * min(age_s, burst.duration_s - age_s) * 2 / burst.duration_s)


@contextlib.contextmanager
def sampling(whole: Whole, interval_s: float, peaks: dict[tuple[str, str], int]) -> Iterator[None]:
    """Run an agent. Keep (pod uid, start of the life) -> its newest peak in ``peaks``."""
    environment = {**os.environ, **whole.environment, "PYTHONPATH": str(ROOT), "NODE_NAME": "n1"}
    command = [sys.executable, "-m", "benchmarks.bursts", "--agent", str(interval_s)]
    with subprocess.Popen(
        [*command, *whole.flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        first = threading.Event()

        def follow() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                for pod in json.loads(line).get("pods", ()):
                    if "peak" in pod:
                        peaks[pod["uid"], pod["startedAt"]] = pod["peak"]
                first.set()

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            if not first.wait(60):
                raise RuntimeError(f"the agent with an interval of {interval_s} s took no sample")
            yield
        finally:
            process.terminate()
            thread.join()


def assign(bursts: list[Burst], interval_s: float, peaks: dict[tuple[str, str], int]) -> None:
    """Give each burst the peak of its life. The start of a life is reported in whole seconds."""
    for (uid, started_at), peak in peaks.items():
        at_s = datetime.fromisoformat(started_at).timestamp()
        for burst in bursts:
            if burst.uid == uid and abs(burst.started_at_s - at_s) < 2.0:
                burst.peaks[interval_s] = max(peak, burst.peaks.get(interval_s, 0))


def run_agent(interval_s: str, *flags: str) -> int:
    """Run the agent's own loop with an interval that its flag may not allow."""
    settings = dataclasses.replace(
        read_settings(["--no-publish", "--json", *flags], os.environ), interval_s=float(interval_s)
    )
    stop, requeue = threading.Event(), threading.Event()
    log_to_stderr()
    devices = device_probe_of(settings)
    return agent._run(settings, Sampler(settings, devices), stop, requeue)


def report(bursts: list[Burst]) -> None:
    print(f"{len(bursts)} bursts of {HEIGHT_BYTES // GIB} GiB on top of 1 GiB;")  # noqa: T201
    print(f"{os.cpu_count()} cores, {platform.machine()}, seen / height")  # noqa: T201
    for shape in SHAPES:
        print(f"\n{shape:>10}" + "".join(f"{f'{i:g} s':>16}" for i in INTERVALS_S))  # noqa: T201
        for duration_s in DURATIONS_S:
            mine = [b for b in bursts if (b.shape, b.duration_s) == (shape, duration_s)]
            cells = ""
            for interval_s in INTERVALS_S:
                above = [b.peaks[interval_s] - BASE_BYTES for b in mine if interval_s in b.peaks]
                seen = [each >= SEEN_BYTES for each in above]
                ratio = statistics.fmean(each / HEIGHT_BYTES for each in above)
                cells += f"{f'{statistics.fmean(seen):.0%} / {ratio:.0%}':>16}"
            print(f"{f'{duration_s:g} s':>10}{cells}   ({len(mine)} bursts)")  # noqa: T201


def main(seconds: float, seed: int) -> int:
    with tempfile.TemporaryDirectory(prefix="headroom-bursts-") as folder:
        whole = Whole(Path(folder), [Gpu(f"GPU-{n}") for n in range(GPUS)], PODS_OF_A_GPU)
        played, stop = Played(whole), threading.Event()
        try:
            threads = []
            for number in range(GPUS * PODS_OF_A_GPU):
                uid = f"{number:08x}-1111-4222-8333-{number:012x}"
                device = whole.run(uid, f"pod-{number}", 0)
                whole.driver.use(whole.node.processes[uid, "main"].pid, {})  # it uses others
                threads.append(
                    threading.Thread(
                        target=played.play, args=(number, uid, device, stop, f"{seed}/{number}")
                    )
                )
            found: dict[float, dict[tuple[str, str], int]] = {i: {} for i in INTERVALS_S}
            with contextlib.ExitStack() as agents:
                for interval_s in INTERVALS_S:
                    agents.enter_context(sampling(whole, interval_s, found[interval_s]))
                for thread in threads:
                    thread.start()
                time.sleep(seconds)
                stop.set()
                for thread in threads:
                    thread.join()
                time.sleep(AROUND_S)
            for interval_s, peaks in found.items():
                assign(played.bursts, interval_s, peaks)
        finally:
            stop.set()
            whole.stop()
        report(played.bursts)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--agent"]:
        sys.exit(run_agent(*sys.argv[2:]))
    parser = argparse.ArgumentParser(description="Measure what peaks have of short bursts.")
    parser.add_argument("--seconds", type=float, default=300.0, help="time in which bursts begin")
    parser.add_argument("--seed", type=int, default=1, help="seed of the times between bursts")
    args = parser.parse_args()
    sys.exit(main(args.seconds, args.seed))
