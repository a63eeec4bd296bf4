"""The agent's own process with no pause between samples, and a count of them in its metrics."""

import sys
from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from agent import __main__ as agent
from agent import metrics

count = 0


class Hurried(agent.Camera):
    def take(self) -> object:
        global count
        count += 1
        return super().take()


class Counting(metrics.AgentCollector):
    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("headroom_hurried_cycles", "Samples taken", value=count)
        yield from super().collect()


def main(argv: Sequence[str]) -> int:
    from agent import serve

    agent.Camera = Hurried
    serve.AgentCollector = Counting
    read = agent.read_settings

    def hurry(argv: Sequence[str], env: object) -> object:
        import dataclasses

        return dataclasses.replace(read(argv, env), interval_s=0.0)

    agent.read_settings = hurry
    return agent.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
