"""Runs a module with a wall clock that moves: python -m tests.chaos.clock FILE MODULE ARGUMENTS

FILE contains the seconds to add to the true time, and may be replaced at any time. Monotonic clocks
stay.
"""

import runpy
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import time_machine


def _follow(file: Path, clock: time_machine.Traveller) -> None:
    moved_s = 0.0
    while True:
        offset_s = float(file.read_text() or moved_s)  # empty while it is being written
        clock.shift(offset_s - moved_s)
        moved_s = offset_s
        time.sleep(0.1)


if __name__ == "__main__":
    _, path, module, *arguments = sys.argv
    traveller = time_machine.travel(datetime.now(UTC), tick=True).start()
    threading.Thread(target=_follow, args=(Path(path), traveller), daemon=True).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
