"""Runs the agent and measures CPU time and memory of every sample inside its process.

    python -m benchmarks.agent_hurried CLOCK ACCOUNT [flags of the agent]

With CLOCK ``real``, the agent is unchanged. With ``hurried``, it samples without a pause. With
``accelerated``, its clocks move on by one interval with every sample, so the number of heartbeats,
writes and cache refreshes per sample is the same as on a node. ACCOUNT is the folder with the token
and the certificate authority of the agent's service account. The results are added to ``/metrics``.
"""

import dataclasses
import functools
import resource
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric

from agent import __main__ as agent
from agent import http_endpoints, metrics
from agent import kube_client as client

#: Number of samples whose figures are kept.
MOST_SAMPLES = 5_000


class Samples:
    """CPU seconds of all threads of the process from each sample to the next."""

    def __init__(self) -> None:
        self.count = 0
        self.cpu_s = array("d")
        self._began_cpu_s = 0.0

    def begin(self) -> None:
        now_s = time.process_time()
        if self.count:
            self.cpu_s.append(now_s - self._began_cpu_s)
            del self.cpu_s[:-MOST_SAMPLES]
        self._began_cpu_s = now_s
        self.count += 1

    def quantile_s(self, ratio: float) -> float:
        """Return a quantile of all samples except the first five, which include imports and
        caches."""
        ordered = sorted(self.cpu_s[5:])
        return ordered[int(ratio * (len(ordered) - 1))] if ordered else 0.0


samples = Samples()


class Measured(agent.Sampler):
    def take(self) -> object:
        samples.begin()
        return super().take()


class Counting(metrics.AgentCollector):
    def collect(self) -> Iterator[Metric]:
        figures = {
            "cycles": float(samples.count),
            "cpu_p50_seconds": samples.quantile_s(0.5),
            "cpu_p99_seconds": samples.quantile_s(0.99),
            "peak_kib": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss),
        }
        for name, value in figures.items():
            yield GaugeMetricFamily(
                f"headroom_hurried_{name}", "Figure of the benchmark", value=value
            )
        yield from super().collect()


def accelerate(interval_s: float) -> None:
    """Advance the clocks that the agent reads by one interval with every sample."""
    monotonic, clock = time.monotonic, time.clock_gettime

    def ahead_s() -> float:
        return samples.count * interval_s

    time.monotonic = lambda: monotonic() + ahead_s()
    time.clock_gettime = lambda which: clock(which) + ahead_s()


def main(argv: Sequence[str]) -> int:
    clock, account, *flags = argv
    client.in_cluster = functools.partial(client.in_cluster, account=Path(account))
    agent.Sampler = Measured
    http_endpoints.AgentCollector = Counting
    read = agent.read_settings

    def settings(argv: Sequence[str], env: object) -> object:
        found = read(argv, env)
        if clock == "accelerated":
            accelerate(found.interval_s)
        return dataclasses.replace(found, interval_s=0.0) if clock == "hurried" else found

    agent.read_settings = settings
    return agent.main(flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
