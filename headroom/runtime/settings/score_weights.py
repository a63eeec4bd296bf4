"""The setting ``score_weights``."""

from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from headroom.core.placement.policy import Weights
from headroom.runtime.settings.constraints import Weight


class ScoreWeights(BaseModel):
    """Weights of the terms of the score, which docs/concepts/scores.md describes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    packing: Weight = Weights().packing
    prediction: Weight = Weights().prediction
    sm_activity: Weight = Weights().sm_activity
    slack: Weight = Weights().slack
    smallest_device: Weight = Weights().smallest_device
    report: Weight = Weights().report

    @model_validator(mode="after")
    def _some_term_counts(self) -> Self:
        if not self.rules.total:
            raise ValueError("all weights are 0, so no term counts. Example: packing: 5")
        return self

    @property
    def rules(self) -> Weights:
        return Weights(**self.model_dump())
