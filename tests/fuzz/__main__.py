"""Feeds hostile inputs to every parser of foreign data, and prints the results.

    python -m tests.fuzz [--inputs 1000000] [--seed 1] [TARGET ...]

The inputs are divided among the targets. Every failure is printed with its seed and number.
"""

import argparse
import sys
from functools import partial

from tests.fuzz.targets import SHARES, made
from tests.fuzz.watchdog import Tally, attacked


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(SHARES))
    parser.add_argument("--inputs", type=int, default=100_000, help="in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="this one input of one target")
    args = parser.parse_args()
    names = args.targets or list(SHARES)
    if unknown := set(names) - SHARES.keys():
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(SHARES)}")
    total = sum(SHARES[name] for name in names)
    tallies = []
    say(f"seed {args.seed}\n{_HEAD}")
    for name in names:
        count = -(-args.inputs * SHARES[name] // total)
        numbers = range(count) if args.only is None else range(args.only, args.only + 1)
        tally = attacked(partial(made, name), numbers, args.seed)
        tallies.append(tally)
        say(_line(tally))
        for failure in tally.failures:
            say(failure)
    failures = sum(len(tally.failures) for tally in tallies)
    inputs, cpu_s = sum(t.inputs for t in tallies), sum(t.cpu_s for t in tallies)
    say(f"{inputs:,} inputs, {cpu_s:.0f} s of CPU time, {failures} failures")
    return 1 if failures else 0


def say(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


_HEAD = (
    f"{'target':<12}{'inputs':>10}{'taken':>10}{'MiB':>7}{'CPU s':>8}{'µs each':>9}"
    f"{'slowest ms':>12}{'peak MiB':>10}{'kept MiB':>10}"
)


def _line(tally: Tally) -> str:
    return (
        f"{tally.target:<12}{tally.inputs:>10,}{tally.taken:>10,}{tally.bytes >> 20:>7}"
        f"{tally.cpu_s:>8.1f}{tally.cpu_s / max(1, tally.inputs) * 1e6:>9.0f}"
        f"{tally.slowest_s * 1e3:>12.1f}{tally.peak_bytes >> 20:>10}{tally.kept_bytes >> 20:>10}"
    )


if __name__ == "__main__":
    sys.exit(main())
