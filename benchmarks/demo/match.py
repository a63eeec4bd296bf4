"""Plays one workload against both schedulers and lets the same referee judge each.

Time is counted in binds: after every ``BATCH`` of them the kubelets admit what was bound since the
last time, and what they admitted one batch earlier reaches the scheduler as the agents' reports.
So Headroom learns where a pod really sits one to two batches after it was bound; at the 10 pods a
second of a busy cluster that is 2 to 4 seconds.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.demo.agents import Agents
from benchmarks.demo.counting import CountingScheduler, Outcome
from benchmarks.demo.fleet import Fleet
from benchmarks.demo.referee import Landed, Referee, Verdict
from benchmarks.demo.scheduler import HeadroomScheduler
from benchmarks.demo.server import Server
from benchmarks.demo.workload import MIB, DemoPod, Workload

BATCH = 20

#: Told after each pod of the first pass.
Advance = Callable[[], None]
Report = Callable[[Iterable[Landed]], None]


class Scheduler(Protocol):
    def schedule(self, pods: Iterable[DemoPod]) -> Iterator[Outcome]:
        """Place the pods in their order; each outcome as soon as it is known."""
        ...


@dataclass(frozen=True, slots=True)
class Result:
    verdict: Verdict
    waiting: tuple[DemoPod, ...]
    refused_binds: int = 0


def play_counting(fleet: Fleet, workload: Workload, seed: int, advance: Advance) -> Result:
    referee = Referee(fleet.for_referee(), seed)
    scheduler = CountingScheduler(fleet.nodes, seed)
    waiting = _play(scheduler, referee, workload.pods, lambda landed: None, advance)
    return Result(referee.verdict(workload.median_mib * MIB), waiting)


def play_headroom(
    fleet: Fleet, workload: Workload, seed: int, server: Server, advance: Advance
) -> Result:
    referee = Referee(fleet.for_referee(), seed)
    nodes = fleet.nodes
    scheduler = HeadroomScheduler(nodes, server.verbs_url)
    agents = Agents(nodes, workload.pods, server.debug_url)
    try:
        waiting = _play(scheduler, referee, workload.pods, agents.report, advance)
    finally:
        scheduler.close()
        agents.close()
    verdict = referee.verdict(workload.median_mib * MIB)
    return Result(verdict, waiting, scheduler.refused_binds)


def _play(
    scheduler: Scheduler,
    referee: Referee,
    pods: Sequence[DemoPod],
    report: Report,
    advance: Advance,
) -> tuple[DemoPod, ...]:
    """Bind what can be bound; the pods that wait in the end.

    What waits is tried once more when every report is in: a pod that was bound but not yet
    observed is charged wherever it may land, so there can be more room than at first.
    """
    admitted: list[Landed] = []
    bound = 0
    waiting: list[DemoPod] = []
    for first_pass in (True, False):
        again, waiting = waiting, []
        for outcome in scheduler.schedule(pods if first_pass else again):
            pod = outcome.pod
            if first_pass:
                advance()
            if outcome.node is None:
                waiting.append(pod)
                continue
            referee.bound(pod.name, outcome.node, pod.devices, pod.request_bytes)
            bound += 1
            if bound % BATCH == 0:
                report(admitted)
                admitted = referee.admit()
        report([*admitted, *referee.admit()])
        admitted = []
    return tuple(waiting)
