"""Plays random nodes on which pods request several devices, and prints the seeds with problems.

python -m tests.model --worlds 5000 --seed 1000
"""

import argparse
import sys
from collections import Counter

from tests.model.device_sets import run


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--worlds", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1000, help="the seed of the first world")
    parser.add_argument("--toggles", action="store_true", help="let steering begin and end")
    asked = parser.parse_args()
    counts, wrong = Counter[str](), 0
    for seed in range(asked.seed, asked.seed + asked.worlds):
        problems, counted = run(seed, asked.toggles)
        counts += counted
        if counted["rejected"]:
            problems.append("the agent rejected a pod")
        if problems:
            wrong += 1
            sys.stdout.write(f"seed {seed}: {'; '.join(problems)}\n")
    sys.stdout.write(f"{asked.worlds} worlds from seed {asked.seed}: {wrong} with a problem\n")
    sys.stdout.writelines(f"{number:8} {kind}\n" for kind, number in sorted(counts.items()))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
