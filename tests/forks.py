"""Runs Headroom's commands like ``python -m``, in forked processes that need no imports.

A new interpreter takes two seconds of CPU to import all of Headroom. Therefore one process per
session imports Headroom and forks the commands. Do not fork commands that need LD_PRELOAD (the
linker reads it only when a program starts) or that execute themselves again. Do not fork commands
whose memory or imports a test checks.
"""

import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.waiting import PATIENCE_S

_PR_SET_PDEATHSIG = 1

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.frozen"])


#: Held while a process is started or killed, because multiprocessing supports only one thread at a
#: time.
_lock = threading.Lock()


def without_main() -> None:
    """Keep forked commands from importing the main module of this process again."""
    vars(sys.modules["__main__"]).update(__spec__=None, __file__=None)


def pipe() -> tuple[Connection, Connection]:
    """Return two connections: the first reads the output of a process, and the second is passed to
    the process.

    Close the second connection after the process has started. For the input of a process, pass the
    first connection and write to the second.
    """
    return _forks.Pipe(duplex=False)


def run(
    module: str, *arguments: str, env: Mapping[str, str], timeout_s: float = PATIENCE_S
) -> "subprocess.CompletedProcess[str]":
    """Run ``python -m module`` in an empty folder. Return its status and output.

    Raise ``subprocess.TimeoutExpired`` after killing the process.
    """
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        process = Forked(module, arguments, stderr, env, stdout)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        output = stdout.read_text(), stderr.read_text()
    return subprocess.CompletedProcess([module, *arguments], status, *output)


class Forked:
    """A forked command, with the methods of ``subprocess.Popen`` that tests need."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        stdout: Connection | Path | None = None,
        stdin: Connection | None = None,
        inside: Callable[[], None] | None = None,
    ) -> None:
        """Start the command in the folder of ``log``. ``env`` is the command's complete
        environment.

        stdout and stderr are appended to ``log``. If ``stdout`` is given, standard output goes
        there instead. The process calls ``inside`` before it runs the command.
        """
        # tests/tiers records which programs a test starts.
        sys.audit("tests.forked", module, *arguments)
        parameters = (module, list(arguments), log, dict(env), stdout, stdin, inside)
        # A daemonic process does not keep this process from ending.
        self._process = _forks.Process(target=_run, args=parameters, daemon=True)
        with _lock:
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        with _lock:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends. Raise ``subprocess.TimeoutExpired`` after the timeout."""
        wait([self._process.sentinel], timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return status

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(
    module: str,
    arguments: Sequence[str],
    log: Path,
    env: Mapping[str, str],
    stdout: Connection | Path | None,
    stdin: Connection | None,
    inside: Callable[[], None] | None,
) -> None:
    # Kill this process when the fork server ends. The fork server ends when the last copy of the
    # descriptor below is closed, so only the session may keep a copy.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    os.setsid()
    os.chdir(log.parent)
    os.environ.clear()
    os.environ.update(env)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if stdout is not None:
        with stdout.open("ab") if isinstance(stdout, Path) else stdout as output:
            os.dup2(output.fileno(), 1)
    if stdin is not None:
        with stdin:
            os.dup2(stdin.fileno(), 0)
        sys.stdin = os.fdopen(0)  # multiprocessing has replaced stdin.
    for each in filter(None, env.get("PYTHONWARNINGS", "").split(",")):
        warnings.simplefilter(each)  # type: ignore[arg-type]
    _load_libraries(env)
    if inside is not None:
        inside()
    # Restore the default handler, which multiprocessing replaces in its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _load_libraries(env: Mapping[str, str]) -> None:
    """Load the libraries in LD_LIBRARY_PATH, because the linker reads it only when a program
    starts.

    When a program opens a loaded library, the linker finds it by its name.
    """
    for folder in filter(None, env.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
        for library in Path(folder).glob("lib*.so.1"):
            ctypes.CDLL(str(library))
