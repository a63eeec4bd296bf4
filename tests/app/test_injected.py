"""Checks that an exception in any coroutine of the controllers, the ledger or the state stops
nothing permanently. The life of a cluster continues to its end, and the exception is counted or
returned.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.controlplane import ROOT

pytestmark = pytest.mark.slow

#: The number of the call at which each coroutine raises.
CALLS = os.environ.get("TEST_INJECTED_CALLS", "1").split(",")


@pytest.mark.parametrize("call", CALLS)
def test_the_life_of_a_cluster_continues_after_any_exception(call: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.app.injection", call],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lives = [json.loads(line) for line in done.stdout.splitlines()]
    assert [life for life in lives if life["missing"]] == []
    alone = [life for life in lives if len(life["raising"]) == 1]
    assert [life for life in alone if life["failures"] < len(life["reached"])] == []
    assert len({name for life in lives for name in life["reached"]}) > 60
