"""Checks that the tests' control plane leaves no processes or files, however its session ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.controlplane import ROOT, ControlPlane
from tests.processes import alive, free_ports
from tests.waiting import until

#: Starts a control plane and a forked command, prints the folder and the process IDs, and waits
#: until it is killed.
SESSION = """
import os, signal, sys
from tests.controlplane import ControlPlane, control_plane
from tests.forks import Forked, without_main
from tests.waiting import until
without_main()

class Etcd(ControlPlane):
    # An API server takes seconds to start.

    start = ControlPlane.spawn_etcd

    def install_crd(self):
        pass

# A shell starts what runs in the background with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
with control_plane(Etcd) as plane:
    fork = Forked("http.server", ["--bind=127.0.0.1", "0"], plane.folder / "fork.log", os.environ)
    # The fork must not create its log while the folder is being deleted.
    until((plane.folder / "fork.log").exists, "the fork runs")
    pids = [str(process.pid) for process in (*plane._processes.values(), fork)]
    sys.stdout.write(" ".join([str(plane.folder), *pids]) + "\\n")
    sys.stdout.flush()
    signal.pause()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "tidy"),
    [
        pytest.param(signal.SIGINT, True, id="Ctrl-C"),
        pytest.param(
            signal.SIGKILL, False, id="killed, so that the next session deletes its files"
        ),
    ],
)
def test_an_ended_session_leaves_no_process_or_folder(
    ending: signal.Signals, tidy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # Do not delete the folders of other sessions.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("tests.processes._YOUNG_S", -1.0)
    command = [sys.executable, "-c", SESSION]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as session:
        assert session.stdout is not None
        folder, *pids = session.stdout.readline().split()
        assert len(pids) == 2
        assert all(alive(int(pid)) for pid in pids)
        session.send_signal(ending)
    until(lambda: not any(alive(int(pid)) for pid in pids), "no process outlives its session")
    if not tidy:
        ControlPlane().stop()
    assert Path(folder).parent == tmp_path
    # A killed session cannot delete the folder of multiprocessing's socket.
    left = [each.name for each in tmp_path.iterdir() if tidy or not each.name.startswith("pymp-")]
    assert left == []


#: Prints ports from the small range that starts at its argument, and waits until it is killed.
OTHER_SESSION = """
import sys
from tests.processes import free_ports
first = int(sys.argv[1])
print(*free_ports(15, range(first, first + 40)), flush=True)
input()
"""


def test_concurrent_sessions_get_different_ports() -> None:
    """The other session requests ports before a server listens on the first session's ports."""
    first = 12_000 + 40 * (os.getpid() % 70)  # this test may run in several sessions at once
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_SESSION, str(first)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        theirs = {*map(int, other.stdout.readline().split())}
        assert len(theirs) == 15
        assert not theirs & {*free_ports(15, range(first, first + 40))}
        other.kill()
