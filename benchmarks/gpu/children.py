"""Starts processes, and ends all of them even if this process is interrupted or killed.

Every process gets its own session, so its children end with it. It also asks the kernel to kill it
when this process dies.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_ENDING_S = 10.0


class ChildFailed(Exception):
    """A process ended, or did not answer in time. The text names it."""


@dataclass(frozen=True, slots=True)
class Done:
    status: int
    out: str
    err: str
    took_s: float


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A process that reads one JSON object per line and writes one per line."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._name = _short(argv)
        self._unread = b""
        self._log = log
        with log.open("wb") as err:
            self.process = subprocess.Popen(
                [*argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                env={**environment},
                cwd=ROOT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as err:
            raise ChildFailed(f"{self._name} ended: {self._why()}") from err

    def read(self, timeout_s: float) -> dict[str, Any]:
        """Return the next line. Raises ``ChildFailed`` if there is none in time."""
        line = self.read_or_none(timeout_s)
        if line is None:
            raise ChildFailed(f"{self._name} did not answer within {timeout_s:g} s")
        return line

    def read_or_none(self, timeout_s: float) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        until_s = time.monotonic() + timeout_s
        fd = self.process.stdout.fileno()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([fd], [], [], max(0.0, until_s - time.monotonic()))
            if not ready:
                return None
            part = os.read(fd, 1 << 16)
            if not part:
                raise ChildFailed(f"{self._name} ended: {self._why()}")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, timeout_s: float, **command: Any) -> dict[str, Any]:
        self.send(**command)
        return self.read(timeout_s)

    def end(self, *, at_once: bool = False) -> int:
        """End the process and return its exit status.

        Its input is closed first, which makes a worker end. With ``at_once``, SIGTERM is sent at
        the same time.
        """
        process = self.process
        if process.stdin is not None and not process.stdin.closed:
            with contextlib.suppress(OSError):
                process.stdin.close()
        for number in (signal.SIGTERM if at_once else None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                _signal(process.pid, number)
            try:
                process.wait(_ENDING_S if number is not signal.SIGKILL else None)
                break
            except subprocess.TimeoutExpired:
                continue
        _signal(process.pid, signal.SIGKILL)  # ends also what it started itself
        if process.stdout is not None:
            process.stdout.close()
        return process.returncode

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _why(self) -> str:
        lines = [line for line in self.log().splitlines() if line.strip()]
        return lines[-1] if lines else "it wrote no error"


class Children:
    """All processes of one run. Their stderr is written to ``folder``."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = {**environment, "PYTHONPATH": _with_root(environment)}
        self._children: list[Child] = []
        self._count = 0
        #: Functions that run when everything ends, last in, first out.
        self.at_end: list[Callable[[], object]] = []

    def start(self, argv: Sequence[str], **environment: str) -> Child:
        self._count += 1
        log = self._folder / f"child-{self._count}.log"
        child = Child(argv, self._environment | environment, log)
        self._children.append(child)
        return child

    def run(
        self, argv: Sequence[str], timeout_s: float, text: str | None = None, **environment: str
    ) -> Done:
        """Run a command to its end. Raises ``ChildFailed`` if it takes longer."""
        began_s = time.monotonic()
        process = subprocess.Popen(
            [*argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment | environment,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
            text=True,
            errors="replace",
        )
        try:
            out, err = process.communicate(text, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ChildFailed(f"{_short(argv)} did not end within {timeout_s:g} s") from error
        finally:
            _signal(process.pid, signal.SIGKILL)
            process.wait()
        return Done(process.returncode, out, err, time.monotonic() - began_s)

    def end_all(self) -> None:
        for child in self._children:
            child.end(at_once=True)
        self._children.clear()
        while self.at_end:
            self.at_end.pop()()


def _with_root(environment: Mapping[str, str]) -> str:
    return os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH", ""))))


def _signal(session: int, number: signal.Signals) -> None:
    try:
        os.killpg(session, number)
    except (ProcessLookupError, PermissionError):
        return


def _short(argv: Sequence[str]) -> str:
    return " ".join([Path(argv[0]).name, *argv[1:4]])
