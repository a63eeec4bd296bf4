"""Measures how many reports an agent writes in an hour: with peaks, without peaks, and with
overuse.

    python -m benchmarks.peak_writes [--hours 1] [--seed 1]

An hour of one node is simulated in steps of the agent's interval of 5 s, with the agent's own code
for attribution, peaks and writing. The node has 8 GPUs of 80 GiB with four pods each:

* churn: containers live for 10 minutes to an hour. They load for 30 s, hold their memory, and use
  up to 4 GiB more for 1 to 30 s about every 20 minutes.
* steady: containers load once, and then their use does not change.
* marks: like steady, but the high-water mark of each container grows by 128 MiB every two minutes
  between two samples. Nothing else in the report changes, so only the peaks cause writes.

Without peaks, the same samples are written without the fields for peaks. With overuse, a pod on
each GPU uses more than it reserved, so any growth there is written."""

import argparse
import logging
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec
import structlog

from agent.kube_publisher import Held
from agent.status_writer import NO_OVERUSE, Overuse, StatusWriter
from headroom.contract.gpunode import GPUNodeStatus, PodUse
from headroom.contract.heartbeat import Confirmation
from tests.agent.lives import GIB, MIB, Node

GPUS, PODS_OF_A_GPU = 8, 4
INTERVAL_S, HEARTBEAT_S = 5.0, 30.0
LOADS_FOR_S = 30.0
SCENARIOS = ("churn", "steady", "marks")


class Publisher:
    """A publisher that accepts everything."""

    def __init__(self) -> None:
        self._status: GPUNodeStatus | None = None
        self._held = Held("uid-1", "1")

    def held(self) -> Held:
        return self._held

    def reported(self) -> tuple[Held, str]:
        assert self._status is not None
        return self._held, self._status.observed_at

    def report(self, status: GPUNodeStatus) -> Held:
        self._status = status
        return self._held

    def heartbeat(self, now: datetime, confirmation: Confirmation) -> str:
        return "1"


@dataclass
class Pod:
    uid: str
    device: str
    chance: random.Random
    scenario: str
    runs: Iterator[int] = field(default_factory=lambda: iter(range(1 << 30)))
    container_id: str = ""
    started_s: float = 0.0
    ends_s: float = -1.0
    size_bytes: int = 0
    burst_until_s: float = 0.0
    burst_bytes: int = 0

    def step(self, node: Node) -> None:
        """Change the pod's use of memory to its use at the current time of the node."""
        if node.now_s >= self.ends_s:
            self._restart(node)
        age_s = node.now_s - self.started_s
        used_bytes = round(self.size_bytes * min(1.0, age_s / LOADS_FOR_S))
        if self.scenario == "churn":
            if self.chance.random() < INTERVAL_S / 1200:
                self.burst_until_s = node.now_s + self.chance.uniform(1, 30)
                self.burst_bytes = self.chance.randrange(4 * GIB)
            if node.now_s < self.burst_until_s:
                used_bytes += self.burst_bytes
        node.used[self.device, self.container_id] = used_bytes
        if self.scenario == "marks":
            mark_bytes = self.size_bytes + 128 * MIB * int(age_s // 120)
            node.marks[self.device, self.container_id] = mark_bytes

    def _restart(self, node: Node) -> None:
        node.end(self.container_id)
        node.containers.pop(self.container_id, None)
        self.container_id = f"{self.uid}-{next(self.runs)}"
        node.run(self.container_id, self.uid)
        self.started_s = node.now_s
        lives_s = self.chance.uniform(600, 3600) if self.scenario == "churn" else math.inf
        self.ends_s = node.now_s + lives_s
        self.size_bytes = self.chance.randrange(GIB, 14 * GIB)


def without_peaks(status: GPUNodeStatus) -> GPUNodeStatus:
    return msgspec.structs.replace(
        status,
        pods=[
            PodUse(p.uid, p.device, p.namespace, p.name, p.container, p.replica, p.used_bytes)
            for p in status.pods
        ],
    )


def writes(scenario: str, hours: float, seed: int) -> tuple[Counter[tuple[str, str]], ...]:
    """Return ``StatusWriter.writes`` with peaks, without peaks, and with overuse."""
    devices = [f"GPU-{number}" for number in range(GPUS)]
    node = Node(devices={uuid: {} for uuid in devices})
    pods = []
    for number in range(GPUS * PODS_OF_A_GPU):
        uid, device = f"u{number}", devices[number % GPUS]
        node.hold(uid, "main", f"{device}::{number // GPUS}")
        pods.append(Pod(uid, device, random.Random(f"{seed}/{number}"), scenario))
    writers = [
        StatusWriter(
            Publisher(),  # type: ignore[arg-type]
            HEARTBEAT_S,
            lambda: node.now_s,
            lambda: datetime.now(UTC),
            random.Random(seed),
            lambda _, overuse=overuse: overuse,  # type: ignore[misc]
        )
        for overuse in (NO_OVERUSE, NO_OVERUSE, Overuse(frozenset(devices)))
    ]
    for _ in range(round(hours * 3600 / INTERVAL_S)):
        for pod in pods:
            pod.step(node)
        node.sample(INTERVAL_S)
        assert node.before is not None
        statuses = node.before, without_peaks(node.before), node.before
        for writer, status in zip(writers, statuses, strict=True):
            writer.deliver(status, node.now_s)
    return tuple(writer.writes for writer in writers)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count an agent's reports with peaks.")
    parser.add_argument("--hours", type=float, default=1.0, help="simulated time")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    print(f"{'reports per hour':<18}{'with peaks':>12}{'without':>10}{'overuse':>10}")  # noqa: T201
    for scenario in SCENARIOS:
        reports = [
            each["report", "accepted"] / args.hours
            for each in writes(scenario, args.hours, args.seed)
        ]
        print(f"{scenario:<18}{reports[0]:>12.0f}{reports[1]:>10.0f}{reports[2]:>10.0f}")  # noqa: T201


if __name__ == "__main__":
    main()
