"""Feeds hostile inputs to every reader of untrusted data, and reports harmful effects.

    python -m tests.fuzz [--inputs 1000000] [--seed 1] [TARGET ...]

The inputs are divided among the targets. Each failure is printed with the options that reproduce
it.
"""

import argparse
import sys

from tests.fuzz.targets import TARGETS
from tests.fuzz.watchdog import attacked


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--inputs", type=int, default=100_000, help="of all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="this one input of one target")
    args = parser.parse_args()
    names = args.targets or list(TARGETS)
    if unknown := set(names) - TARGETS.keys():
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    total, failures = sum(TARGETS[name][0] for name in names), 0
    say("target                  inputs     taken   CPU s  slowest ms  peak, kept MiB")
    for name in names:
        share, make = TARGETS[name]
        count = -(-args.inputs * share // total)
        numbers = range(count) if args.only is None else range(args.only, args.only + 1)
        tally = attacked(make, numbers, args.seed)
        failures += len(tally.failures)
        memory = f"{tally.peak_bytes >> 20}, {tally.kept_bytes >> 20}"
        counts = f"{tally.inputs:>10,}{tally.taken:>10,}"
        times = f"{tally.cpu_s:>8.1f}{tally.slowest_s * 1e3:>12.1f}"
        say(f"{name:<20}{counts}{times}{memory:>16}", *tally.failures)
    say(f"{failures} failures")
    return 1 if failures else 0


def say(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
