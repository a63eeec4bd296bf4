"""Measures how often predicted devices are wrong on busy nodes, why, and what that costs.

    python -m benchmarks.surprises [--pods 5000] [--nodes 20] [--seed 1]

Short jobs come and go all the time on nodes with time-sliced GPUs. Only time is simulated. State,
fit, score and ledger are the extender's own. Kubelet and plugin of each node are the models of
``tests/standin``, which are compared with the real ones. The delays from bind to admission and from
admission to report are the delays of a kubelet and of an agent. The extender learns of the end or
failure of a pod later than the kubelet. Memory use is added up from the processes on each simulated
device, independently of predictions.

In addition, per 1,000 pods: ``BYPASSING`` pods are bound without a reservation, ``DELETED`` pods
are deleted before they are admitted, ``FAILING`` replicas become unhealthy, and the plugin is
restarted ``RESTARTS`` times with the other policy and back.
"""

import argparse
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import typer

from headroom.core.cluster.trackers.prediction_tracker import Outcome
from headroom.core.placement.prediction_outcome import Result, Surprise
from tests.driver import GIB
from tests.standin.node import StandIn
from tests.standin.plugin import Settings
from tests.truth.world import Predicted, gpus

GPUS, MEMORY_GIB, REPLICAS = 4, 80, 4
SIZES_GIB = (4, 8, 12, 16, 20, 24, 32, 40, 48, 60)
#: Each job runs for at least this long.
LEAST_LIFE_S = 10.0
#: Events per 1,000 pods.
BYPASSING, DELETED, FAILING, RESTARTS = 10, 10, 1, 1
#: Whenever something changes, waiting pods are tried until this many have been rejected.
LOOKED_AT = 8
SAMPLE_EVERY_S = 5.0
#: A failed replica is healthy again after this time, when an administrator restarts its plugin.
REPAIRED_AFTER_S = 120.0


#: Device choice, factor on the delays, and mean seconds that a job runs.
CASES = (
    ("predicted", 1, 70.0),
    ("predicted", 5, 70.0),
    ("predicted", 1, 700.0),
)


@dataclass
class Delays:
    """Delays in seconds, drawn for each event. ``slow`` multiplies the delays of kubelet and
    agent."""

    chance: random.Random
    slow: float
    life_s: float

    def admission(self) -> float:
        """Return the delay from the Binding to the kubelet's decision. It mostly comes from a
        watch, and sometimes from a busy node."""
        return self.slow * min(20.0, self.chance.lognormvariate(-2.0, 1.0))

    def report(self) -> float:
        """Return the delay from a change of the kubelet's checkpoint to the agent's report. Agents
        write once a second at most."""
        return self.slow * self.chance.uniform(0.1, 1.0)

    def end_told(self) -> float:
        """Return the delay from the kubelet's release of a pod to the watch event of its end."""
        return self.slow * self.chance.uniform(0.05, 0.5)

    def life(self) -> float:
        return LEAST_LIFE_S + self.chance.expovariate(1 / (self.life_s - LEAST_LIFE_S))


@dataclass
class Tally:
    placed: int = 0
    admitted: int = 0
    #: For each observed admission, the result of the prediction and the conclusion of the extender.
    results: Counter[Result] = field(default_factory=Counter)
    surprises: Counter[Surprise] = field(default_factory=Counter)
    #: Number of admissions after which the pods on a device use more than its memory, according
    #: to the stand-in, and the excess of each. ``recognised`` counts the admissions after which
    #: the extender reported a miss for one of these pods.
    overcommits: int = 0
    bypassing_overcommits: int = 0
    overcommitted_bytes: list[int] = field(default_factory=list)
    recognised: int = 0
    admission_s: list[float] = field(default_factory=list)
    window_s: list[float] = field(default_factory=list)
    #: Share of the memory of all devices that is in use, while pods arrive.
    used_ratio: list[float] = field(default_factory=list)


class Churn:
    def __init__(
        self, choice: str, nodes: int, pods: int, slow: float, life_s: float, seed: int
    ) -> None:
        self.chance = random.Random(seed)
        self.delays = Delays(random.Random(seed + 1), slow, life_s)
        self.nodes = {
            f"n{n}": StandIn(gpus(GPUS, MEMORY_GIB), Settings(REPLICAS), seed=seed + n)
            for n in range(nodes)
        }
        self.world = Predicted(self.nodes, choice)
        self.pods = pods
        self.tally = Tally()
        self.ids = itertools.count(1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._waiting: list[int] = []
        self._bound_s: dict[str, float] = {}
        self._reporting: set[str] = set()
        #: For each time that a device was overcommitted, the pods that were on it.
        self._together: list[set[str]] = []
        self._deleted: set[str] = set()

    def run(self) -> Tally:
        # Arrivals exceed what the nodes can take; two and a half pods fill a GPU.
        rate = 1.1 * len(self.nodes) * GPUS * 2.5 / self.delays.life_s
        at_s = 0.0
        for number in range(self.pods):
            at_s += self.chance.expovariate(rate)
            self._at(at_s, self._arrives)
            for happens, times in (
                (self._bypasses, BYPASSING),
                (self._fails, FAILING),
                (self._is_restarted, RESTARTS),
            ):
                if number % (1000 // times) == 500 // times:
                    self._at(at_s, happens)
        for number in range(int(at_s / SAMPLE_EVERY_S)):
            if number * SAMPLE_EVERY_S > 2 * self.delays.life_s:  # the nodes are full by then
                self._at(number * SAMPLE_EVERY_S, self._sample)
        while self._events:
            self.world.now_s, _, event = heapq.heappop(self._events)
            event()
        missed = {outcome.uid for outcome in self.world.misses}
        self.tally.recognised = sum(bool(there & missed) for there in self._together)
        return self.tally

    def _sample(self) -> None:
        used = sum(node.used_bytes().total() for node in self.nodes.values())
        has_bytes = len(self.nodes) * GPUS * MEMORY_GIB * GIB
        self.tally.used_ratio.append(used / has_bytes)

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), event))

    def _in(self, delay_s: float, event: Callable[[], None]) -> None:
        self._at(self.world.now_s + delay_s, event)

    # Pods.

    def _arrives(self) -> None:
        self._waiting.append(self.chance.choice(SIZES_GIB))
        self._place()

    def _place(self) -> None:
        """Place waiting pods, the oldest first, until some have been rejected."""
        rejected: list[int] = []
        while self._waiting and len(rejected) < LOOKED_AT:
            gib = self._waiting.pop(0)
            uid = f"p{next(self.ids)}"
            node = self.world.bind(uid, gib)
            if node is None:
                rejected.append(gib)
                continue
            self.tally.placed += 1
            self._bound_s[uid] = self.world.now_s
            delay_s = self.delays.admission()
            if self.chance.random() < DELETED / 1000:
                self._in(delay_s / 2, lambda uid=uid: self._is_deleted(uid))
            self._in(delay_s, lambda uid=uid, node=node: self._is_admitted(uid, node))
        self._waiting = rejected + self._waiting

    def _is_deleted(self, uid: str) -> None:
        self._deleted.add(uid)
        self.world.hear_of_end(uid)
        self._place()

    def _is_admitted(self, uid: str, node: str) -> None:
        if uid in self._deleted:
            return
        before = self.world.excess_bytes(node)
        if not self.world.admit(uid):
            # The kubelet rejects the pod; its end is reported at once.
            self.world.hear_of_end(uid)
            return
        self.tally.admitted += 1
        self.tally.admission_s.append(self.world.now_s - self._bound_s[uid])
        self._weigh(node, before)
        self._in(self.delays.life(), lambda: self._ends(uid, node))
        self._changed(node)

    def _weigh(self, node: str, before: dict[str, int], bypassing: bool = False) -> None:
        after = self.world.excess_bytes(node)
        more = sum(after.values()) - sum(before.get(uuid, 0) for uuid in after)
        if more > 0 and bypassing:
            self.tally.bypassing_overcommits += 1
        elif more > 0:
            self.tally.overcommits += 1
            self.tally.overcommitted_bytes.append(more)
            worse = {uuid for uuid in after if after[uuid] > before.get(uuid, 0)}
            processes = self.nodes[node].processes.values()
            self._together.append({p.uid for p in processes if worse & p.used_bytes.keys()})

    def _ends(self, uid: str, node: str) -> None:
        self.world.finish(uid, node)
        self._changed(node)
        self._in(self.delays.end_told(), lambda: self._end_is_told(uid))

    def _end_is_told(self, uid: str) -> None:
        self.world.hear_of_end(uid)
        self._place()

    # What else happens.

    def _bypasses(self) -> None:
        node = self.chance.choice([n for n, s in self.nodes.items() if s.devices.available] or [""])
        if not node:
            return
        uid = f"other{next(self.ids)}"
        before = self.world.excess_bytes(node)
        self.world.bypass(uid, 4, node)
        self._weigh(node, before, bypassing=True)
        self._in(self.delays.end_told(), lambda: self.world.hear_of(uid, node))
        self._in(self.delays.life(), lambda: self._ends(uid, node))
        self._changed(node)

    def _fails(self) -> None:
        node = self.chance.choice(list(self.nodes))
        if replicas := sorted(self.nodes[node].devices.available):
            self.nodes[node].fail(self.chance.choice(replicas))
            self._changed(node)
            self._in(REPAIRED_AFTER_S, lambda: self._restart(node, Settings(REPLICAS)))

    def _is_restarted(self) -> None:
        node = self.chance.choice(list(self.nodes))
        self._restart(node, Settings(REPLICAS, policy="packed", release=20))
        self._in(REPAIRED_AFTER_S, lambda: self._restart(node, Settings(REPLICAS)))

    def _restart(self, node: str, settings: Settings) -> None:
        self.nodes[node].start_plugin(settings)
        self._changed(node)

    # Reports and watch events.

    def _changed(self, node: str) -> None:
        if node not in self._reporting:
            self._reporting.add(node)
            self._in(self.delays.report(), lambda: self._reports(node))

    def _reports(self, node: str) -> None:
        self._reporting.discard(node)
        for outcome in self.world.report(node).values():
            self._count(outcome)
        self._place()

    def _count(self, outcome: Outcome) -> None:
        self.tally.results[outcome.result] += 1
        if outcome.surprise is not None:
            self.tally.surprises[outcome.surprise] += 1
        if outcome.result is not Result.UNSEEN:
            self.tally.window_s.append(outcome.window_s)


def percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def row(choice: str, slow: float, life_s: float, tally: Tally) -> str:
    def per_1000(count: int) -> str:
        return f"{1000 * count / max(1, tally.admitted):.1f}"

    kinds = ", ".join(f"{s.value} {per_1000(n)}" for s, n in tally.surprises.most_common())
    over = tally.overcommitted_bytes
    sizes = f"{percentile(over, 0.5) / GIB:.0f} / {max(over) / GIB:.0f} GiB" if over else "-"
    cells = [
        choice,
        f"x {slow:g}",
        f"{life_s:g} s",
        str(tally.placed),
        f"{sum(tally.used_ratio) / max(1, len(tally.used_ratio)):.0%}",
        f"{percentile(tally.admission_s, 0.5):.2f} / {percentile(tally.admission_s, 0.99):.2f}",
        f"{percentile(tally.window_s, 0.5):.2f} / {percentile(tally.window_s, 0.99):.2f}",
        per_1000(tally.results[Result.SHIFTED]),
        per_1000(tally.results[Result.MISS]) + (f" ({kinds})" if kinds else ""),
        f"{per_1000(tally.overcommits)} ({tally.recognised} of {tally.overcommits} called a miss)",
        sizes,
        per_1000(tally.bypassing_overcommits),
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pods", type=int, default=5000)
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    typer.echo(
        "| device-choice | delays | jobs run | placed | memory used "
        "| binding to admission p50 / p99, s | to the report p50 / p99, s "
        "| shifted | misses per 1,000 | admissions that overcommitted per 1,000 "
        "| by p50 / most | bypassing pods that did |"
    )
    typer.echo("|" + "---|" * 12)
    for choice, slow, life_s in CASES:
        churn = Churn(choice, given.nodes, given.pods, slow, life_s, given.seed)
        typer.echo(row(choice, slow, life_s, churn.run()))


if __name__ == "__main__":
    main()
