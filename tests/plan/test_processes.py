"""Checks that the processes of a plan end with it."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.plan import generated
from tests.waiting import until


def workers(pid: int) -> list[int]:
    """Return the processes of a plan that have begun to replay."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        names = {each: Path(f"/proc/{each}/cmdline").read_bytes() for each in children}
    except OSError:
        return []
    return [int(each) for each, name in names.items() if b"spawn_main" in name]


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_end_if_the_plan_is_killed(tmp_path: Path) -> None:
    pods, nodes = generated.write(tmp_path, generated.rows(14, 1, 1.0), 40)
    command = [sys.executable, "-m", "headroom", "plan", "--pods", str(pods)]
    command += ["--machines", str(nodes), "--processes", "2"]
    with (tmp_path / "log").open("w") as log:
        plan = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: len(workers(plan.pid)) == 2, "both workers replay")
        found = workers(plan.pid)
    finally:
        plan.kill()
        plan.wait()
    until(lambda: not any(map(is_there, found)), "no worker is left")
