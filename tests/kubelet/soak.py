"""Soaks a steered node with pods of every shape and restarts of the agent, the plugin and the
kubelet.

    python -m tests.kubelet.soak [--pods 2000] [--restarts 50] [--seed 1] [--kubelet kubelet-1.36]
    python -m tests.kubelet.soak --pods 100 --restarts 0 --cpu 100

The kubelet, the device plugin and the API server are real. The driver and the containers are
simulated. The agent, the plugin and the kubelet are each restarted ``--restarts`` times, in random
order. The program prints a report. The exit status is 1 if one of these conditions fails:

* a pod without a GPU that is bound right after a GPU pod waits at most for the agent's deadlines
  longer than the slowest pod that is bound alone,
* every replica exists again after every restart, and no replica is held at the end,
* pods get their reserved devices, a container with several GPUs gets different GPUs, and no pod
  counts as a bypass of the agent,
* restarts and pods do not increase the number of the agent's threads and file descriptors.

With ``--cpu``, two processes per CPU use all CPU time that they get, and a quota in periods of
10 ms limits the agent to the CPU time that its request guarantees, in millicores. On a real node,
the agent gets at least this CPU time. This needs root and cgroup v1.

Kubelet 1.37 and newer cannot be steered.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.controlplane import control_plane
from tests.driver import Gpu
from tests.kubelet.conftest import STEERED_KUBELET
from tests.kubelet.node import Node, node
from tests.kubelet.node_objects import gpu_container, gpu_pod
from tests.kubelet.steered_node import SteeredNode

GPUS, REPLICAS = 4, 12
#: Number of pods that run at the same time.
TOGETHER = 12
#: Sum of the agent's deadlines for its own answer and for the plugin's answer.
DEADLINES_S = 6.0
#: The logs of a pod that takes longer are printed.
SLOW_S = 5.0
CPU = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 10_000
#: Maximum growth of the agent's threads and file descriptors between its start and its end.
MAX_GROWN_THREADS, MAX_GROWN_DESCRIPTORS = 3, 8


class Soak:
    def __init__(self, steered: SteeredNode, lots: random.Random) -> None:
        self.steered = steered
        self.node: Node = steered.node
        self.lots = lots
        self.shapes: Counter[str] = Counter()
        self.failures: list[str] = []
        #: Waiting times of pods without a GPU. ``alone_s`` is for pods that are bound when nothing
        #: else happens, and ``beside_s`` for pods that are bound right after a GPU pod.
        self.alone_s: list[float] = []
        self.beside_s: list[float] = []
        self.gpu_s: list[float] = []
        #: Durations of the agent's answers to the kubelet.
        self.answers_s: list[float] = []
        self.bypassed = 0
        #: Names of the pods that have a reservation.
        self.reserved: set[str] = set()
        #: Number of reserved pods that a restarted kubelet rejected.
        self.lost = 0
        #: Growth of the agent's threads and file descriptors in each life of the agent.
        self.grown: list[tuple[int, int]] = []
        self.running: list[str] = []
        #: Maps the names of deleted pods that may still exist to their UIDs.
        self.ending: dict[str, str] = {}
        self.number = 0
        #: The last restarts, each with the time when it ended.
        self.restarted: list[str] = []
        self.began = self.vitals()
        #: Number of restarts of the plugin and the kubelet in this life of the agent, and the
        #: maximum over all lives.
        self.restarts = self.most_restarts = 0

    def vitals(self) -> tuple[int, int]:
        folder = Path(f"/proc/{self.node.pid('agent')}")
        return len(list((folder / "task").iterdir())), len(os.listdir(folder / "fd"))

    def pod(self) -> None:
        self.number += 1
        name = f"s{self.number}"
        shape = self.lots.choice(
            ["main", "init", "sidecar", "two", "several", "stranger", "plain", "beside", "wide"]
        )
        self.shapes[shape] += 1
        pod, reserved, gpus = gpu_pod(name), True, 1
        match shape:
            case "init":
                pod["spec"]["initContainers"] = [gpu_container("init")]
            case "sidecar":
                sidecar = gpu_container("side")
                sidecar["resources"] = {}
                pod["spec"]["initContainers"] = [sidecar | {"restartPolicy": "Always"}]
            case "two":
                pod["spec"]["containers"].append(gpu_container("other"))
                reserved = False
            case "several":
                gpus, reserved = 2, False
            case "wide":
                gpus = self.lots.randint(2, GPUS)
                if self.lots.random() < 0.5:
                    pod["spec"]["initContainers"] = [gpu_container("init", gpus=gpus - 1)]
            case "stranger":
                reserved = False
            case "plain":
                pod["spec"]["containers"][0]["resources"] = {}
                reserved = False
        if gpus > 1:
            pod["spec"]["containers"] = [gpu_container("main", gpus=gpus)]
        self.forget_gone()
        devices = self.devices()[:gpus]
        began_s = time.monotonic()
        if reserved:
            self.reserved.add(name)
            self.steered.reservation(pod, devices, 1)
            self.steered.bind(name)
        else:
            self.node.bind(pod)
        if shape == "beside":
            self.plain(f"{name}-plain", self.beside_s)
        if shape == "plain":
            self.node.wait(lambda: self.node.runtime.running(name), f"a container of {name}")
            self.alone_s.append(time.monotonic() - began_s)
        else:
            self.node.wait(lambda: self.node.held(name), f"a pod {name} that was admitted")
            self.gpu_s.append(time.monotonic() - began_s)
            self.explain(name, self.gpu_s[-1])
            held = self.node.held(name)
            found = {each.device for each in held}
            if reserved and found != {*devices}:
                self.failures.append(f"{name} ({shape}) was reserved {devices} and got {found}")
            main = [each.device for each in held if each.container == "main"]
            if len({*main}) != gpus:
                self.failures.append(f"{name} ({shape}) got {main} for {gpus} GPUs")
        self.running.append(name)
        while len(self.running) > TOGETHER:
            self.end(self.running.pop(self.lots.randrange(len(self.running))))

    def plain(self, name: str, times: list[float]) -> None:
        """Start a pod without a GPU, record how long it waits, and end it."""
        pod = gpu_pod(name)
        pod["spec"]["containers"][0]["resources"] = {}
        began_s = time.monotonic()
        self.node.bind(pod)
        self.node.wait(lambda: self.node.runtime.running(name), f"a container of {name}")
        times.append(time.monotonic() - began_s)
        self.explain(name, times[-1])
        self.node.delete(name)

    def explain(self, name: str, took_s: float) -> None:
        """Print the log lines of the kubelet and the agent about a slow pod."""
        if took_s < SLOW_S:
            return
        sys.stderr.write(f"{name} took {took_s:.1f} s, at {time.time():.1f}; {self.restarted}\n")
        lines = [line for line in self.node.log("kubelet").splitlines() if name in line]
        lines += self.node.log("agent").splitlines()[-12:]
        sys.stderr.writelines(f"  {line[:300]}\n" for line in lines[-60:])

    def devices(self) -> list[str]:
        """Return the devices, ordered by free replicas, most first."""
        held = Counter(each.device for each in self.node.held())
        return sorted((f"GPU-{i}" for i in range(GPUS)), key=lambda uuid: (held[uuid], uuid))

    def end(self, name: str) -> None:
        self.ending[name] = self.node.uid(name)
        self.node.delete(name)

    def forget_gone(self) -> None:
        gone = [each for each in self.ending if self.node.is_gone(each)]
        self.steered.forget([self.ending.pop(each) for each in gone])

    def restart(self, process: str) -> None:
        match process:
            case "agent":
                self.life_ended()
                if self.lots.random() < 0.5:
                    self.node.kill("agent")
                else:
                    self.node._processes["agent"].terminate()
                    self.node.end("agent")
                self.steered.start_agent()
            case "plugin":
                self.node.kill("nvidia-device-plugin")
                self.node.wait(lambda: not self.steered.steered(), "a report without steering")
                self.node.start_plugin()
                self.node._show("nvidia-device-plugin")
            case "kubelet":
                self.node.kill("kubelet")
                self.node.wait(lambda: not self.steered.steered(), "a report without steering")
                self.node.start_kubelet()
                self.node._show("kubelet")
        self.steered.until_steered()
        self.node.wait(lambda: self.node.allocatable() == GPUS * REPLICAS, "every replica")
        # A restarted kubelet can reject a pod whose container had not started yet.
        for name in [each for each in self.running if each in self.reserved]:
            if "UnexpectedAdmissionError" in self.node.events(name):
                self.running.remove(name)
                self.lost += 1
                self.end(name)
        # Wait, because a restarted agent counts ended pods as unconfirmed. While there are
        # unconfirmed pods, an extender reserves one device at a time.
        self.node.wait(lambda: all(map(self.node.is_gone, self.ending)), "that ended pods are gone")
        self.forget_gone()
        self.restarted = [*self.restarted[-2:], f"{process} at {time.time():.1f}"]
        if process == "agent":
            self.began, self.restarts = self.vitals(), 0
        else:
            self.restarts += 1
            self.most_restarts = max(self.most_restarts, self.restarts)

    def life_ended(self) -> None:
        threads, descriptors = self.vitals()
        self.grown.append((threads - self.began[0], descriptors - self.began[1]))

    def finish(self) -> None:
        for name in self.running:
            self.end(name)
        self.node.wait(lambda: all(map(self.node.is_gone, self.ending)), "that all are gone")
        self.steered.forget(list(self.ending.values()))
        self.node.wait(lambda: not self.node.held(), "that every replica is free")
        self.life_ended()
        log = self.node.log("agent").splitlines()
        answered = (json.loads(line) for line in log if "preference_answered" in line)
        self.answers_s = [each["took_ms"] / 1000 for each in answered]
        for number, line in enumerate(log):
            if "steering_bypassed" in line:
                self.bypassed += 1
                sys.stderr.writelines(
                    f"  {each[:300]}\n" for each in log[max(0, number - 15) :][:17]
                )
        if self.bypassed:
            self.failures.append(f"{self.bypassed} pods count as bypassing the agent")
        most_s = max(self.alone_s, default=0.0) + DEADLINES_S
        if late := [each for each in self.beside_s if each > most_s]:
            self.failures.append(f"{len(late)} pods without a GPU took more than {most_s:.1f} s")
        for threads, descriptors in self.grown:
            if threads > MAX_GROWN_THREADS or descriptors > MAX_GROWN_DESCRIPTORS:
                self.failures.append(f"{threads} threads, {descriptors} descriptors more in a life")


@contextlib.contextmanager
def starved(pid: int, milli: int) -> Iterator[None]:
    """Keep all CPUs busy, and limit the CPU time of a process to ``milli`` millicores."""
    group = CPU / f"headroom-soak-{os.getpid()}"
    group.mkdir()
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        # The kernel's minimum quota is 1 ms.
        period_us = max(PERIOD_US, 1_000_000 // milli)
        (group / "cpu.shares").write_text("20480")
        (group / "cpu.cfs_period_us").write_text(str(period_us))
        (group / "cpu.cfs_quota_us").write_text(str(period_us * milli // 1000))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()
        for moved in (group / "cgroup.procs").read_text().split():
            (CPU / "cgroup.procs").write_text(moved)
        group.rmdir()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pods", type=int, default=2000)
    parser.add_argument("--restarts", type=int, default=50, help="of each process")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kubelet", default=STEERED_KUBELET, help="its binary")
    parser.add_argument("--cpu", type=int, default=0, help="the agent's request; 0: no limit")
    args = parser.parse_args()
    lots = random.Random(args.seed)
    work: list[str] = ["pod"] * args.pods
    for process in ("agent", "plugin", "kubelet"):
        work += [process] * args.restarts
    lots.shuffle(work)
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        plane = stack.enter_context(control_plane())
        gpus = [Gpu(f"GPU-{index}") for index in range(GPUS)]
        # Remove the limit of image pulls, because the kubelet would delay pods that arrive in quick
        # succession ("pull QPS exceeded").
        settings = {"registryPullQPS": 0, "kubelet": args.kubelet}
        soaked = stack.enter_context(node(plane, "soaked", gpus, REPLICAS, **settings))
        if args.cpu:
            soaked.answer_s = None
        steered = SteeredNode(soaked)
        soak = Soak(steered, lots)
        if args.cpu:
            stack.enter_context(starved(soaked.pid("agent"), args.cpu))
        for number, each in enumerate(work):
            if each == "pod":
                soak.pod()
            else:
                soak.restart(each)
            if number % 100 == 0:
                took_s = time.monotonic() - began_s
                sys.stderr.write(f"{number} of {len(work)} after {took_s:.0f} s\n")
        soak.finish()
    _report(soak, args, time.monotonic() - began_s)
    return 1 if soak.failures else 0


def _report(soak: Soak, args: argparse.Namespace, took_s: float) -> None:
    say(
        f"{args.kubelet}, {args.pods} pods, {args.restarts} restarts of each process,"
        f" seed {args.seed}:"
        f" {took_s:.0f} s"
    )
    shapes = ", ".join(f"{count} {shape}" for shape, count in sorted(soak.shapes.items()))
    say(f"shapes: {shapes}")
    for what, times in (
        ("without a GPU, alone, until a container runs", soak.alone_s),
        ("without a GPU, right after one with a GPU, the same", soak.beside_s),
        ("with a GPU, until they hold a device", soak.gpu_s),
        ("with a GPU, for the agent's answer", soak.answers_s),
    ):
        if ordered := sorted(times):
            p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
            say(f"pods {what}: p50 {p50:.3f} s, p99 {p99:.3f} s, at most {ordered[-1]:.3f} s")
    say(f"bypassed: {soak.bypassed}; rejected when a kubelet started: {soak.lost}")
    threads = max(each[0] for each in soak.grown)
    descriptors = max(each[1] for each in soak.grown)
    say(
        f"grown in a life of the agent, at most: {threads} threads, {descriptors} descriptors;"
        f" restarts of plugin and kubelet in the longest life: {soak.most_restarts}"
    )
    for failure in soak.failures:
        say(f"FAILED: {failure}")


if __name__ == "__main__":
    sys.exit(main())
