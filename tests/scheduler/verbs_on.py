"""Creates the handlers of the verbs on a cluster state, with the test's clock and ledger."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from prometheus_client import CollectorRegistry

from extender.ledger.bind_call import BindRequest, Bound, Outcome
from extender.metrics import Telemetry
from extender.scheduler.bind import Binder
from extender.scheduler.scheduling_state import SchedulingState
from extender.scheduler.server import Verbs
from headroom.core.cluster.changes import Event
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.journal.journal import Journal
from headroom.runtime.settings.settings import Settings

#: All tests share these metrics, because creating metrics takes longer than some examples of
#: property tests.
_UNREAD = Telemetry(CollectorRegistry())


@dataclass
class Clocks:
    now_s: Callable[[], float]
    epoch_s: float = 0.0

    def monotonic(self) -> float:
        return self.now_s()

    def time(self) -> float:
        return self.epoch_s + self.now_s()


@dataclass
class Replica:
    writer: ClusterWriter
    settings: Settings
    observes: bool = False

    def unready(self) -> str:
        return ""

    def deliver(self, events: Sequence[Event]) -> None:
        self.writer.apply(events)


class BindsNothing:
    async def bind(self, ask: BindRequest) -> Outcome:
        return Bound()


def verbs_on(
    writer: ClusterWriter,
    now_s: Callable[[], float],
    ledger: Binder | None = None,
    journal: Journal | None = None,
    telemetry: Telemetry | None = None,
    epoch_s: float = 0.0,
    best_only: bool = False,
    preempts_for_memory: bool = False,
    bind_deadline_s: float = inf,
) -> Verbs:
    settings = Settings().model_copy(
        update={
            "filter_best_only": best_only,
            "preempt_for_memory": preempts_for_memory,
            "bind_deadline_s": bind_deadline_s,
        }
    )
    state = SchedulingState(
        writer.cluster,
        writer.parts.calls,
        journal or Journal(),
        telemetry or _UNREAD,
        Replica(writer, settings),
        Clocks(now_s, epoch_s),
    )
    return Verbs(state, ledger or BindsNothing())
