"""Measures how many pods a steered node with busy CPUs admits, and how fast.

    python -m tests.kubelet.busy [--pods 100] [--cpu 100] [--seed 1]

The kubelet, the device plugin and the API server are real. The driver and the containers are
simulated. Two processes per CPU use all CPU time that they get. A quota in periods of 10 ms limits
the agent to the CPU time that its request guarantees (``--cpu``, in millicores). On a real node,
the agent gets at least this CPU time. Needs root and cgroup v1. The exit status is 1 if a pod is
rejected or gets a different device than the reserved device.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.controlplane import control_plane
from tests.driver import Gpu
from tests.kubelet.conftest import STEERED_KUBELET
from tests.kubelet.node import node
from tests.kubelet.node_objects import gpu_pod
from tests.kubelet.steered_node import SteeredNode

CPU = Path("/sys/fs/cgroup/cpu")
GPUS, REPLICAS = 2, 12
PERIOD_US = 10_000
#: The agent's default interval between samples, in seconds.
INTERVAL_S = 5


@contextlib.contextmanager
def limited(pid: int, milli: int) -> Iterator[None]:
    """Limit the CPU time of a process to ``milli`` millicores during the context."""
    group = CPU / f"headroom-busy-{os.getpid()}"
    group.mkdir()
    try:
        # The kernel's minimum quota is 1 ms.
        period_us = max(PERIOD_US, 1_000_000 // milli)
        (group / "cpu.shares").write_text("20480")
        (group / "cpu.cfs_period_us").write_text(str(period_us))
        (group / "cpu.cfs_quota_us").write_text(str(period_us * milli // 1000))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for each in (group / "cgroup.procs").read_text().split():
            (CPU / "cgroup.procs").write_text(each)
        group.rmdir()


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Keep all CPUs busy during the context."""
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pods", type=int, default=100)
    parser.add_argument("--cpu", type=int, default=100, help="the agent's request; 0: no limit")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    lots = random.Random(args.seed)
    rejected, misplaced, took_s = [], [], []
    with contextlib.ExitStack() as stack:
        plane = stack.enter_context(control_plane())
        gpus = [Gpu(f"GPU-{index}") for index in range(GPUS)]
        settings = {"registryPullQPS": 0, "kubelet": STEERED_KUBELET}
        own = stack.enter_context(node(plane, "busy", gpus, REPLICAS, **settings))
        own.answer_s = None
        steered = SteeredNode(own, ("--device-choice=steered", f"--interval={INTERVAL_S}"))
        steered.until_steered()
        stack.enter_context(busy())
        if args.cpu:
            stack.enter_context(limited(own.pid("agent"), args.cpu))
        for number in range(args.pods):
            name, device = f"b{number}", lots.choice([gpu.uuid for gpu in gpus])
            steered.reservation(gpu_pod(name), device, 4)
            began_s = time.monotonic()
            steered.bind(name)
            own.wait(
                lambda name=name: own.held(name) or "UnexpectedAdmissionError" in own.events(name),
                f"a decision about {name}",
            )
            if held := own.held(name):
                took_s.append(time.monotonic() - began_s)
                if held[0].device != device:
                    misplaced.append(name)
                own.wait(lambda name=name: steered.observed(name), f"a report of {name}")
            else:
                rejected.append(f"{name}: {own.status(name).get('message', '')}")
            uid = own.uid(name)
            own.delete(name, by_force=True)
            steered.forget([uid])
        answers = _answers(own.log("agent"))
        bypassed = own.log("agent").count("steering_bypassed")
    sys.stdout.write(
        f"{args.pods} pods, agent with {args.cpu}m CPU, all CPUs busy:"
        f" {len(took_s)} admitted, {len(rejected)} rejected, {len(misplaced)} misplaced,"
        f" {bypassed} bypassed\n"
        f"answers of the agent: {_quantiles([each / 1000 for each in answers])}\n"
        f"from the bind to the device: {_quantiles(took_s)}\n"
    )
    for each in rejected:
        sys.stdout.write(f"FAILED: {each}\n")
    return 1 if rejected or misplaced else 0


def _answers(log: str) -> list[float]:
    """Return the duration of each response to GetPreferredAllocation in milliseconds."""
    lines = (line for line in log.splitlines() if "preference_answered" in line)
    return [json.loads(line)["took_ms"] for line in lines]


def _quantiles(values: list[float]) -> str:
    ordered = sorted(values)
    if not ordered:
        return "none"
    p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    return f"p50 {p50:.3f} s, p99 {p99:.3f} s, at most {ordered[-1]:.3f} s"


if __name__ == "__main__":
    sys.exit(main())
