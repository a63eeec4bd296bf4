"""Runs a simulated day of churn with all real processes of Headroom, and checks their memory.

    make soak ARGS="--pods 400 --altered console"

The events of a simulated hour follow each other and take about a minute. Agents keep the records of
ended containers for ten minutes, which must be shorter than the warm-up, which is half of the day.
The settings are as deployed, except that the journal is full after an hour and garbage collection
runs every few seconds.

The exit status is 1 if the memory of a process keeps growing, or reaches the limit in its manifest.
``--altered`` also runs a second process of a component, with a mutant that keeps data that it
should discard (``tests/soak/started.py``).
"""

import argparse
import sys
import time
from collections.abc import Sequence

from benchmarks.hotpath.machine import machine
from tests.soak.day import Amounts, Hour, settled
from tests.soak.judge import findings, table
from tests.soak.site import Site, running
from tests.soak.started import MUTANTS

#: Seconds between the end of an hour and its memory sample, so that loops with a period of 1 s have
#: run.
REST_S = 1.0
#: Minimum duration of an hour in seconds.
LEAST_S = 56.0


def run_day(site: Site, amounts: Amounts, hours: int, least_s: float = 0.0) -> None:
    """Run the hours, each for at least ``least_s``, and sample the memory after each hour."""
    for number in range(hours):
        began_s = time.monotonic()
        Hour(site, number, amounts).run()
        time.sleep(max(REST_S, began_s + least_s - time.monotonic()))
        site.sample()
        now = ", ".join(f"{name} {each.rests[-1] >> 20}" for name, each in site.memory.items())
        sys.stdout.write(f"hour {number + 1}, MiB: {now}\n")
        sys.stdout.flush()
    settled(site)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--nodes", type=int, default=1_000, help="nodes that stay")
    parser.add_argument("--joining", type=int, default=20, help="nodes that join in an hour")
    parser.add_argument("--pods", type=int, default=400, help="pods of an hour")
    parser.add_argument("--requests", type=int, default=200, help="requests to each port")
    parser.add_argument("--altered", nargs="*", choices=MUTANTS, default=())
    asked = parser.parse_args(argv)
    amounts = Amounts(
        nodes=asked.joining,
        owners=max(1, asked.pods // 20),
        pods=asked.pods,
        # This is the number of pods on the node. The agent remembers 4,096 pods, which it reaches
        # after 8 hours.
        agent_pods=64,
        agent_steps=8,
        requests=asked.requests,
        text_bytes=2_000,
    )
    began_s = time.monotonic()
    decisions = asked.pods + asked.requests + 2 * asked.joining
    with running(asked.nodes, asked.altered, {"journal_decisions": decisions}) as site:
        run_day(site, amounts, asked.hours, LEAST_S)
        found = findings(site.memory, site.limits)
    minutes = (time.monotonic() - began_s) / 60
    sys.stdout.write(f"{machine()}; {amounts}; {asked.nodes} nodes stay; {minutes:.0f} minutes\n")
    for line in [*table(site.memory, site.limits), *found]:
        sys.stdout.write(f"{line}\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
