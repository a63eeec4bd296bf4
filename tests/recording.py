"""A cluster state that keeps the effects of its changes until a test reads them."""

from typing import Any

from headroom.core.cluster.changes import Effects
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.trackers.prediction_tracker import Outcome


class RecordingState(ClusterWriter):
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._outcomes: list[Outcome] = []
        self._unsettled: dict[str, None] = {}

    def take_effects(self) -> Effects:
        effects = super().take_effects()
        self._outcomes += effects.outcomes
        self._unsettled |= effects.unsettled
        return effects

    def take_outcomes(self) -> list[Outcome]:
        self.take_effects()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def take_unsettled(self) -> list[str]:
        self.take_effects()
        unsettled, self._unsettled = list(self._unsettled), {}
        return unsettled

    @property
    def has_unsettled(self) -> bool:
        self.take_effects()
        return bool(self._unsettled)
