"""Commands of ours as ``python -m`` would run them, in processes that are spared the imports.

A fresh interpreter takes two seconds of CPU to import all of Headroom, so one process of each
session does that and forks the rest. Not for what heeds LD_PRELOAD or LD_LIBRARY_PATH, which are
read when a process begins, and not for what executes itself anew.
"""

import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from kubernetes.config import kube_config

_PR_SET_PDEATHSIG = 1

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        *("extender.app.cli", "extender.app.embedded", "extender.app.cluster"),
        "extender.app.webhook",
    ]
)


def pipe() -> tuple[Connection, Connection]:
    """One to read what a process prints, and one that is given to it and closed afterwards."""
    return _forks.Pipe(duplex=False)


def run(
    module: str, *arguments: str, env: Mapping[str, str], timeout_s: float = 60.0
) -> "subprocess.CompletedProcess[str]":
    """As ``subprocess.run`` of ``python -m``, with what it printed; it runs in an empty folder.

    Raises ``subprocess.TimeoutExpired``, and the process is gone then.
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
        told = stdout.read_text(), stderr.read_text()
    return subprocess.CompletedProcess([module, *arguments], status, *told)


class Forked:
    """As much of ``subprocess.Popen`` as tests need."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        stdout: Connection | Path | None = None,
    ) -> None:
        """What it prints is added to ``log``, but for what ``stdout`` gets where there is one.

        ``env`` is its whole environment; it runs in the folder of ``log``.
        """
        told = (module, list(arguments), log, dict(env), stdout)
        # Daemonic: whoever ends without having waited for it does not wait then.
        self._process = _forks.Process(target=_run, args=told, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises ``subprocess.TimeoutExpired``."""
        self._process.join(timeout)
        if (status := self._process.exitcode) is None:
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
) -> None:
    # Not to outlive the session: the process that forks ends with it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.chdir(log.parent)
    os.environ.clear()
    os.environ.update(env)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if stdout is not None:
        with stdout.open("ab") if isinstance(stdout, Path) else stdout as told:
            os.dup2(told.fileno(), 1)
    # Which the client of the API server reads once, as it is imported.
    kube_config.KUBE_CONFIG_DEFAULT_LOCATION = env.get("KUBECONFIG", "~/.kube/config")
    # In place of what multiprocessing set for its own children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
