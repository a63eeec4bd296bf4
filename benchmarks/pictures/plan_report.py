"""The HTML report of `headroom plan` for a generated history of two weeks."""

import subprocess
import sys
from pathlib import Path

from benchmarks.plan import generated

NODES, SCALE = 12, 0.3


def report(folder: Path) -> Path:
    """Write the history and the report into the folder. Return the path of the report.

    This takes about a minute of CPU time.
    """
    pods, nodes = generated.write(folder, generated.rows(14, seed=1, scale=SCALE), NODES)
    prices, page = folder / "prices.yaml", folder / "report.html"
    prices.write_text("L40S: 1.20\n", encoding="utf-8")
    compared = ("--device-choice", "counting", "--device-choice", "predicted", "--replicas", "4")
    files = ("--pods", pods, "--machines", nodes, "--prices", prices, "--html", page)
    command = (sys.executable, "-m", "headroom.plugin", "plan", *files, *compared)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return page
