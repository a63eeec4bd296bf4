"""Runs ``headroom`` with the history of the pictured fleet.

python -m benchmarks.pictures.seeded STEP serve ...     STEP is the newest step of the history.
"""

import sys

from benchmarks.pictures.fleet import PicturedFleet
from headroom.commands import app
from headroom.console import console


def main() -> None:
    fleet = PicturedFleet(now_step=int(sys.argv.pop(1)))
    fleet.fill()
    history = fleet.history()
    console.History = lambda: history  # type: ignore[assignment, misc]
    app()


if __name__ == "__main__":
    main()
