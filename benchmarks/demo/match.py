"""Runs one workload through each scheduler. The same kind of referee judges both.

Time is counted in binds. After every ``BATCH`` binds, the kubelets admit the pods that were bound
since the previous batch, and the agents report the pods that were admitted in the previous batch.
So Headroom receives the device of a pod one to two batches after the bind. At 10 pods per second,
as in a busy cluster, that is 2 to 4 seconds.
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

#: Number of binds between two admissions.
BATCH = 20

#: Called once for each pod, to advance the progress bar.
Advance = Callable[[], None]
Report = Callable[[Iterable[Landed]], None]


class Scheduler(Protocol):
    def schedule(self, pods: Iterable[DemoPod]) -> Iterator[Outcome]:
        """Place the pods in order. Yield each outcome when it is decided."""
        ...


@dataclass(frozen=True, slots=True)
class Result:
    verdict: Verdict
    #: Pods that are still pending at the end.
    waiting: tuple[DemoPod, ...]
    #: Number of binds that the extender rejected, including retries.
    rejected_binds: int = 0


def play_counting(fleet: Fleet, workload: Workload, seed: int, advance: Advance) -> Result:
    """Place the workload by replica counting."""
    referee = Referee(fleet.for_referee(), seed)
    scheduler = CountingScheduler(fleet.nodes, seed)
    waiting = _play(scheduler, referee, workload.pods, lambda landed: None, advance)
    return Result(referee.verdict(workload.median_mib * MIB), waiting)


def play_headroom(
    fleet: Fleet, workload: Workload, seed: int, server: Server, advance: Advance
) -> Result:
    """Place the workload through the extender of ``server``, which must serve the same fleet.

    Raises ``ServerFailed`` if a call fails.
    """
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
    return Result(verdict, waiting, scheduler.rejected_binds)


def _play(
    scheduler: Scheduler,
    referee: Referee,
    pods: Sequence[DemoPod],
    report: Report,
    advance: Advance,
) -> tuple[DemoPod, ...]:
    """Schedule all pods. Return the pods that are still pending.

    Pending pods are retried once, after all reports have arrived. More memory can be free then,
    because an unconfirmed pod is charged on each of its candidate devices until its report.
    """
    admitted: list[Landed] = []
    bound = 0
    waiting: list[DemoPod] = []
    for first_pass in (True, False):
        retried, waiting = waiting, []
        for outcome in scheduler.schedule(pods if first_pass else retried):
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
