"""Starts real processes for tests, with a folder for their files. Both are removed when the session
ends.

When the process that started them ends for any reason, the kernel kills the processes. ``stop``
deletes the folder. If ``stop`` was not called, the next ``Processes`` object of the same kind
deletes the folder.
"""

import contextlib
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from tests.forks import Forked
from tests.waiting import PATIENCE_S, until

F = TypeVar("F", bound=Callable[..., object])

_YOUNG_S = 60.0
#: Command line prefix with which the kernel kills the command when its parent dies, even if the
#: parent is already dead. The first argument is the process ID of the parent. ``preexec_fn`` is not
#: used, because running Python code between fork and exec is not safe with the threads of gRPC.
DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "sh", "-c", '[ $PPID = "$0" ] && exec "$@"')


def starts_processes(fixture: F) -> F:
    """Mark every test that uses this fixture as slow. Put it below ``@pytest.fixture``."""
    vars(fixture)["starts_processes"] = True
    return fixture


class Processes:
    """Starts and stops processes by name. ``kind`` is the prefix of the folder. Each process logs
    to ``<process name>.log``.
    """

    def __init__(self, kind: str) -> None:
        _sweep(kind)
        self.folder = Path(tempfile.mkdtemp(prefix=kind))
        self._lock = (self.folder / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._processes: dict[str, subprocess.Popen[bytes] | Forked] = {}

    def stop(self) -> None:
        """Kill all processes and delete the folder."""
        for name in list(self._processes):
            self.kill(name)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def spawn(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> None:
        """Start a process that runs until ``kill(name)`` or ``stop``. Its output goes to its log
        file.

        The kernel also kills the process when the calling thread ends. ``env`` is added to the
        environment of this process.
        """
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*DIE_WITH_PARENT, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=None if env is None else {**os.environ, **env},
                start_new_session=True,  # Ctrl-C reaches only the tests.
            )

    def fork(
        self,
        name: str,
        module: str,
        *arguments: str,
        env: Mapping[str, str],
        inside: Callable[[], None] | None = None,
    ) -> None:
        """Start a command of Headroom like ``python -m`` (see tests/forks.py)."""
        log = self.folder / f"{name}.log"
        log.touch()
        self._processes[name] = Forked(module, arguments, log, {**os.environ, **env}, inside=inside)

    def kill(self, name: str) -> None:
        """Send SIGKILL and wait until the process has ended."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def end(self, name: str) -> None:
        """Send SIGTERM and wait until the process has ended, for at most ``PATIENCE_S``."""
        process = self._processes.pop(name)
        process.terminate()
        process.wait(timeout=PATIENCE_S)

    def pause(self, name: str) -> None:
        """Send SIGSTOP, so that the process keeps its connections open but answers no requests."""
        self._processes[name].send_signal(signal.SIGSTOP)
        until(lambda: _stopped(self.pid(name)), f"{name} is frozen")

    def resume(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGCONT)

    def runs(self, name: str) -> bool:
        """Return whether the process was started and no test has killed or ended it."""
        return name in self._processes

    def ended(self, name: str) -> bool:
        """Return whether the process was started and has ended by itself."""
        return name in self._processes and self._processes[name].poll() is not None

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def logs(self) -> str:
        """Return the last 4,000 characters of each log."""
        return "\n".join(f"--- {name}\n{self.log(name)[-4000:]}" for name in self._processes)

    def raise_if_ended(self) -> None:
        """Raise ``RuntimeError`` if a process ended by itself."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended by itself:\n{self.logs()}")


#: Each test worker has its own range of ports. The ranges lie below Linux's range for outgoing
#: connections, because an outgoing connection could take a port before its server listens.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
_PORTS = range(15_000 + 2_000 * _WORKER, 17_000 + 2_000 * _WORKER)
#: Recently returned ports. For each of the newest ports, an open socket claims the port.
_chosen: deque[int] = deque(maxlen=1_000)
_claims: deque[int] = deque()
_MOST_CLAIMS = 200


def free_ports(count: int, among: range = _PORTS) -> list[int]:
    """Return different free ports that were not returned recently.

    No other test session on this machine gets these ports, even before a server listens on them.
    """
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        ports = sorted({*among} - {*_chosen})
        for port in random.sample(ports, len(ports)):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                _claim(port)
                found.append(port)
            if len(found) == count:
                _chosen.extend(found)
                return found
    raise RuntimeError(f"fewer than {count} ports are free from {among[0]} to {among[-1]}")


def _claim(port: int) -> None:
    """Claim the port until this process ends. Raise ``OSError`` if another session has it.

    The claim is an abstract socket, whose name is unique in the network namespace, like a port.
    """
    with socket.socket(socket.AF_UNIX) as claim:
        claim.bind(f"\0headroom-tests-port-{port}")
        _claims.append(claim.detach())
    if len(_claims) > _MOST_CLAIMS:
        os.close(_claims.popleft())


def alive(pid: int) -> bool:
    """Return whether the process is running. A zombie counts as ended."""
    try:
        return _state(Path(f"/proc/{pid}/stat")) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _stopped(pid: int) -> bool:
    """Return whether all threads of the process are stopped."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # The process is ending.
        return all(_state(each / "stat") == "T" for each in Path(f"/proc/{pid}/task").iterdir())
    return False


def _state(stat: Path) -> str:
    """Return the state letter of a process or thread from its ``stat`` file."""
    return stat.read_text().rpartition(")")[2].split()[0]


def _sweep(kind: str) -> None:
    """Delete the folders of sessions that were killed.

    A locked folder is in use. The lock also works across containers, unlike process IDs. A folder
    younger than a minute is kept, because it may not be locked yet.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{kind}*"):
        with contextlib.suppress(OSError), (folder / "lock").open() as lock:
            if time.time() - folder.stat().st_ctime > _YOUNG_S:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
