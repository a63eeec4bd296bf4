"""Checks the requests that docs/design/recommendations.md gives as examples."""

import math
import random
import re
import statistics
from pathlib import Path

import pytest

from headroom.core.recommend.lives import Ending, Life, Track
from tests.controlplane import ROOT

GIB = 1 << 30
SEEDS = 300
DOCUMENTED = re.compile(r"([\d.]+) GiB\s+after (\d+)")


def median_request_gib(lives: int) -> float:
    """Return the median request for ``lives`` peaks of 8 GiB that vary by 5 %."""
    requests: list[int] = []
    for seed in range(SEEDS):
        chance, track = random.Random(seed), Track()
        for _ in range(lives):
            peak_bytes = int(8 * GIB * math.exp(chance.gauss(0.0, 0.05)))
            track.record(Life(peak_bytes, 1.0, 1e6, Ending.COMPLETED))
        found = track.estimate()
        assert found is not None
        requests.append(found.request_bytes)
    return statistics.median(requests) / GIB


def test_the_documented_requests_are_the_medians() -> None:
    text = Path(ROOT, "docs/design/recommendations.md").read_text()
    passage = text[text.index("Peaks of 8 GiB") :].split("- **")[0]
    found = DOCUMENTED.findall(passage)
    assert len(found) == 3
    for gib, lives in found:
        assert median_request_gib(int(lives)) == pytest.approx(float(gib), abs=0.05), lives
