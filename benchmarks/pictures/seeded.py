"""Runs ``headroom`` with the history of the pictured fleet.

python -m benchmarks.pictures.seeded STEP serve ...: STEP is the newest step of the history.
"""

import sys

from benchmarks.pictures.fleet import PicturedFleet
from extender.app import console
from extender.app.cli import app


def main() -> None:
    fleet = PicturedFleet(now_step=int(sys.argv.pop(1)))
    fleet.fill()
    history = fleet.history()
    console.History = lambda: history  # type: ignore[assignment, misc]
    app()


if __name__ == "__main__":
    main()
