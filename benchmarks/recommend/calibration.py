"""Derives the constants of the generated lives from the summaries of real pods.

    python -m benchmarks.recommend.calibration SUMMARIES.csv

SUMMARIES.csv has one row per pod of the trace cluster-trace-v2026-GenAI (144 Stable Diffusion pods,
about 23 hours, a sample each minute). Its columns are ``samples``, and ``min_mib`` to ``max_mib``
of the pod's GPU memory. The trace scales its values, so only ratios are used. The command printed
the constants below for this file. The lifetimes come from the trace cluster-trace-gpu-v2023.
"""

import csv
import math
import statistics
import sys
from pathlib import Path

#: A pod that was recorded for the whole day has at least this many samples.
WHOLE_DAY_SAMPLES = 1400

#: Mean of the natural logarithm of a day's peak over the 95th percentile of its samples, and its
#: standard deviation, for 104 pods that were recorded for the whole day.
PEAK_OVER_P95_LOG_MEAN = 0.346
PEAK_OVER_P95_LOG_SD = 0.158
#: Standard deviation of the logarithm of these pods' peaks. Lives of one service differ at most as
#: much, because the pods are of several services.
PEAK_BETWEEN_LIVES_LOG_SD = 0.169

#: The lifetime of a pod is log-normal. Its median (540 s) and its deviation, which follows from
#: median and mean (25,839 s), come from the 8,152 pods of cluster-trace-gpu-v2023.
LIFETIME_MEDIAN_S = 540.0
LIFETIME_LOG_SD = math.sqrt(2 * math.log(25_839 / 540))


def calibrate(path: Path) -> dict[str, float]:
    """Return the constants that follow from the summaries, by name."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["samples"]) >= WHOLE_DAY_SAMPLES]
    over_p95 = [math.log(int(row["max_mib"]) / int(row["p95_mib"])) for row in rows]
    peaks = [math.log(int(row["max_mib"])) for row in rows]
    return {
        "PEAK_OVER_P95_LOG_MEAN": round(statistics.mean(over_p95), 3),
        "PEAK_OVER_P95_LOG_SD": round(statistics.stdev(over_p95), 3),
        "PEAK_BETWEEN_LIVES_LOG_SD": round(statistics.stdev(peaks), 3),
    }


if __name__ == "__main__":
    for name, value in calibrate(Path(sys.argv[1])).items():
        sys.stdout.write(f"{name} = {value}\n")
