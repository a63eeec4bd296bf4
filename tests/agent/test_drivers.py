"""Runs the agent on each branch of NVIDIA's driver, as described in tests/branches.py."""

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agent.whole import Whole
from tests.branches import BRANCHES, Branch, table
from tests.driver import h100, library_folder

MAX_UNATTRIBUTED_PROCESSES = 64

Report = Callable[..., dict[str, Any]]

DOCS = Path(__file__).parents[2] / "docs/design/agent.md"
MIB, GIB = 1 << 20, 1 << 30
#: Number of processes on each of three GPUs. The last number does not fit into the first buffer.
COUNTS = (1, 33, 65)

each_branch = pytest.mark.parametrize("branch", BRANCHES, ids=lambda branch: str(branch.driver))


@each_branch
def test_every_branch_of_the_driver_is_read(
    branch: Branch, report: Report, environment: dict[str, str]
) -> None:
    """Each process uses as many MiB as its process ID, and the last GPU requires a reset."""
    environment["LD_LIBRARY_PATH"] = str(library_folder(branch.missing))
    lines, pids = [branch.play], itertools.count(1)
    for index, count in enumerate(COUNTS):
        lines.append(f"device GPU-{index} {80 * GIB} {GIB} {70 * GIB} NVIDIA A100\n")
        lines += [f"process compute {pid} {pid * MIB}\n" for pid in itertools.islice(pids, count)]
    status = report("".join(lines) + "recovery 1\n")

    found = [(each["pid"], each["used"]) for each in status["unattributedProcesses"]]
    assert found == [(pid, pid * MIB) for pid in range(99, 99 - MAX_UNATTRIBUTED_PROCESSES, -1)]
    assert status["driverVersion"] == branch.driver
    reserved = GIB if branch.has_memory_v2 else 0
    assert {(d["memory"], d["reserved"]) for d in status["devices"]} == {(80 * GIB, reserved)}
    asks = "" if branch.recovery_code else "driver asks for a GPU reset"
    assert [d.get("healthReason", "") for d in status["devices"]] == ["", "", asks]
    nvml = next(source for source in status["sources"] if source["name"] == "nvml")
    why = "" if branch.has_memory_v2 else "driver does not report its reserve, which counts as 0"
    assert nvml.get("message", "") == why


@pytest.mark.slow  # The test starts an agent for each branch.
@each_branch
def test_limits_are_read_from_branches_that_support_them(branch: Branch, tmp_path: Path) -> None:
    whole = Whole(tmp_path / "node", [h100("GPU-a")], replicas=1)
    whole.missing = branch.missing
    try:
        whole.driver.say("", *branch.play.splitlines())
        whole.run("0000000a-1111-4222-8333-00000000000a", "a", 8 * GIB)
        status = json.loads(whole.once("--json", "--pause", "0").stdout)
    finally:
        whole.stop()
    limits = next(source for source in status["sources"] if source["name"] == "limits")
    assert limits.get("state", "ok") == ("ok" if branch.has_limits else "absent")


def test_the_table_in_the_docs_equals_the_simulated_one() -> None:
    there = re.search(r"<!-- drivers -->\n(.*?)<!-- end of drivers -->", DOCS.read_text(), re.S)
    assert there is not None
    assert there[1].strip() == table(), f"the table in {DOCS.name} should be:\n{table()}"
