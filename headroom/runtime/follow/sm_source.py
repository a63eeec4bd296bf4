"""Data classes for the queries of SM activity's history, and for their answers."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from headroom.contract.dcgm import Key
from headroom.runtime.promql import EVERY_CLUSTER, Queries


@dataclass(frozen=True, slots=True)
class Span:
    """The quantile and the window to query, in seconds."""

    quantile: float
    window_s: float


@dataclass(frozen=True, slots=True)
class QuerySource:
    """Address, queries and interval. ``url`` may contain a user name and a password, which must not
    be logged."""

    url: str
    span: Span
    every_s: float
    timeout_s: float
    #: Maximum age of a figure's newest sample. Older figures are not used.
    stale_after_s: float
    #: A file that is read before each query, because tokens are renewed.
    token_file: Path | None = None
    ca: Path | None = None
    queries: Queries = EVERY_CLUSTER


@dataclass(slots=True)
class Answer:
    """One answer of Prometheus, by device. Ages are relative to the time of evaluation."""

    evaluated_at_s: float = math.nan
    ratios: dict[Key, float] = field(default_factory=dict)
    ages_s: dict[Key, float] = field(default_factory=dict)
