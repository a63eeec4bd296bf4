"""``make cluster`` for a person: it prints what it started, and Ctrl-C leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.controlplane import ROOT
from tests.processes import alive
from tests.waiting import until

PATIENCE_S = 90.0


def descendants(pid: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        for each in map(int, child.read_text().split()):
            found += [each, *descendants(each)]
    return found


@pytest.mark.parametrize("at", ["once it is up", "while it starts"])
def test_ctrl_c_ends_all_that_make_cluster_started(binaries: None, tmp_path: Path, at: str) -> None:
    # As Ctrl-C does it: to make and to all that make runs, in one process group.
    make = ["make", "--old-file=.venv/test.stamp", f"RUN={sys.executable}", "cluster"]
    said = tmp_path / "said"
    with (
        said.open("w") as output,
        subprocess.Popen(
            make,
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(tmp_path)},
            stdout=output,
            stderr=output,
            start_new_session=True,
            # Who runs the tests in the background of a shell has them ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as command,
    ):
        started: list[int] = []
        try:
            deadline_s = time.monotonic() + PATIENCE_S
            while True:
                started = descendants(command.pid)
                if at == "while it starts" and len(started) >= 3:  # Python, etcd, kube-apiserver
                    break
                if "Ctrl-C ends all of it" in said.read_text():
                    break
                assert command.poll() is None, said.read_text()
                assert time.monotonic() < deadline_s, said.read_text()
                time.sleep(0.1)
            if at == "once it is up":
                assert len(started) >= 5
                kubeconfig = re.search(r"KUBECONFIG=(\S+)", said.read_text())
                assert kubeconfig
                assert Path(kubeconfig[1]).is_file()
            os.killpg(command.pid, signal.SIGINT)
            command.wait(PATIENCE_S)
            until(lambda: not any(map(alive, started)), "all that it started has ended", 10.0)
        finally:
            left = [pid for pid in (command.pid, *started) if alive(pid)]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
    assert not left, f"{len(left)} processes outlive Ctrl-C"
    assert "Traceback" not in said.read_text()
    assert not list(tmp_path.glob("headroom-plane-*"))
