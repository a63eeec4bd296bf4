"""Real processes for tests, and one folder for their files; neither outlives the session.

They are killed by the kernel when the one that started them dies, however it dies; the folder goes
with ``stop``, or, where that was never reached, with the next one of the same kind.
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
from tests.waiting import until

F = TypeVar("F", bound=Callable[..., object])

_YOUNG_S = 60.0
#: Runs a command that the kernel kills when its parent, whose id comes first, dies or has died.
#: No ``preexec_fn``, which is Python code between fork and exec and not safe beside gRPC's threads.
DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "sh", "-c", '[ $PPID = "$0" ] && exec "$@"')


def starts_processes(fixture: F) -> F:
    """Mark every test that uses the fixture as slow; stands below ``@pytest.fixture``."""
    vars(fixture)["starts_processes"] = True
    return fixture


class Processes:
    """``kind`` begins the name of the folder, whose log files are ``<name of a process>.log``."""

    def __init__(self, kind: str) -> None:
        _sweep(kind)
        self.folder = Path(tempfile.mkdtemp(prefix=kind))
        self._lock = (self.folder / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._processes: dict[str, subprocess.Popen[bytes] | Forked] = {}

    def stop(self) -> None:
        for name in list(self._processes):
            self.kill(name)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def spawn(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> None:
        """Run a process until ``kill(name)`` or ``stop``; ``log(name)`` is what it printed.

        Only from a thread that lasts: the kernel kills the process when that thread ends.
        """
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*DIE_WITH_PARENT, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=None if env is None else {**os.environ, **env},
                start_new_session=True,  # Ctrl-C is for the tests to handle, not for them
            )

    def fork(self, name: str, module: str, *arguments: str, env: Mapping[str, str]) -> None:
        """The same for a command of ours, as ``python -m``; see tests/forks.py."""
        log = self.folder / f"{name}.log"
        log.touch()
        self._processes[name] = Forked(module, arguments, log, {**os.environ, **env})

    def kill(self, name: str) -> None:
        """SIGKILL, as a machine that fails would; returns when the process is gone."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def end(self, name: str) -> None:
        """SIGTERM; returns when the process has ended by itself."""
        process = self._processes.pop(name)
        process.terminate()
        process.wait(timeout=60)

    def pause(self, name: str) -> None:
        """Freeze it: its connections stay open and nothing answers from when this returns."""
        self._processes[name].send_signal(signal.SIGSTOP)
        until(lambda: _stopped(self.pid(name)), f"{name} is frozen")

    def resume(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGCONT)

    def runs(self, name: str) -> bool:
        """Whether it was started, and not killed since."""
        return name in self._processes

    def ended(self, name: str) -> bool:
        """Whether it was started and has ended by itself."""
        return name in self._processes and self._processes[name].poll() is not None

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def logs(self) -> str:
        """The end of each."""
        return "\n".join(f"--- {name}\n{self.log(name)[-4000:]}" for name in self._processes)

    def raise_if_ended(self) -> None:
        """All of them serve until they are told to stop: one that ended by itself has failed."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended by itself:\n{self.logs()}")


#: Below what Linux gives to outgoing connections, which else take a port before its server does.
#: Each process that runs tests has a part of its own: a server listens only a while after its port
#: was chosen, and another's may be there first.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
_PORTS = range(15_000 + 2_000 * _WORKER, 17_000 + 2_000 * _WORKER)
#: Chosen lately.
_chosen: deque[int] = deque(maxlen=1_000)


def free_ports(count: int) -> list[int]:
    """Ports that were free just now, all different, also from those of the calls before."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(sorted({*_PORTS} - {*_chosen}), len(_PORTS) - len(_chosen)):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
            if len(found) == count:
                _chosen.extend(found)
                return found
    raise RuntimeError(f"fewer than {count} ports are free from {_PORTS[0]} to {_PORTS[-1]}")


def alive(pid: int) -> bool:
    """Whether it still runs; a zombie that nobody has waited for yet does not."""
    try:
        return _state(Path(f"/proc/{pid}/stat")) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _stopped(pid: int) -> bool:
    """Whether each of its threads is."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that ends just now
        return all(_state(each / "stat") == "T" for each in Path(f"/proc/{pid}/task").iterdir())
    return False


def _state(stat: Path) -> str:
    """What the kernel says that a process or a thread does, as one letter."""
    return stat.read_text().rpartition(")")[2].split()[0]


def _sweep(kind: str) -> None:
    """Remove what a session that was killed could not.

    The lock tells the dead from the living, process ids would not across containers; a folder
    that is younger than a minute may not have been locked yet.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{kind}*"):
        with contextlib.suppress(OSError), (folder / "lock").open() as lock:
            if time.time() - folder.stat().st_ctime > _YOUNG_S:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
