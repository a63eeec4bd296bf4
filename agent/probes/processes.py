"""Whose the processes are that the driver lists: /proc and its cgroups.

The driver lists process ids of the caller's own namespace. An agent that does not share the host's
(``hostPID``) is told of few or none and finds fewer in /proc; it must not take that for strangers,
so then nothing is attributed at all, and said.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from agent.probes.cgroup import NOBODY, owner
from agent.probes.readings import DeviceReading, ProcessReading, Reading, SourceReading

SOURCE = "proc"

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: /proc tells starts in ticks, rounded down.
_TICK_S = 1 / _TICKS_PER_S
_MOST_BYTES = 1 << 16

#: A process that the driver goes on listing is looked at again after this time. Its pid could be
#: given to another process in between only if the kernel went through all pids in that time.
LOOK_AGAIN_S = 15.0


_NO_HOST_PID = "processes of others cannot be seen: the agent needs hostPID: true"


class ProcessProbe:
    """``root`` is /proc or where the host's is mounted; ``boot_s`` is the kernel's uptime."""

    def __init__(
        self,
        root: Path,
        boot_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
        look_again_s: float = LOOK_AGAIN_S,
    ) -> None:
        self._root = root
        self._boot_s = boot_s
        self._look_again_s = look_again_s
        #: When all processes were looked at last.
        self._looked_s = float("-inf")
        #: pid -> what it was when last seen alive, of the processes of the last sample.
        self._last: dict[int, ProcessReading] = {}
        #: pid -> signature of its directory in /proc when it was read.
        self._signatures: dict[int, int] = {}

    def follow(self, readings: Sequence[Reading]) -> Iterable[Reading]:
        """A ``ProcessReading`` for each process that a device lists."""
        # Whoever is listed had started by now; an id that started later was given out again.
        listed_at_s = self._boot_s()
        pids = {pid for r in readings if isinstance(r, DeviceReading) for pid in r.processes or ()}
        if why := self._why_hidden():
            return [SourceReading(SOURCE, "degraded", why)]
        known = self._last
        if listed_at_s - self._looked_s >= self._look_again_s:
            known, self._looked_s = self._unchanged(), listed_at_s
        found = {pid: known.get(pid) or self._process(pid, listed_at_s) for pid in sorted(pids)}
        self._last = {pid: process for pid, process in found.items() if process.command}
        for pid in self._signatures.keys() - self._last.keys():
            del self._signatures[pid]
        source = SourceReading(SOURCE)
        if not all(process.known for process in found.values()):
            source = SourceReading(SOURCE, "degraded", "processes may not be looked at")
        return [*found.values(), source]

    def _unchanged(self) -> dict[int, ProcessReading]:
        """The processes of pods that still are the same processes.

        A pod's process stays in its pod. Others are read again, for the names that they may take.
        """
        return {
            pid: process
            for pid, process in self._last.items()
            if process.pods and self._signatures.get(pid) == self._signature(pid)
        }

    def _signature(self, pid: int) -> int | None:
        try:
            return _signature(os.stat(f"{self._root}/{pid}"))
        except OSError:
            return None

    def _why_hidden(self) -> str:
        """Why the host's processes cannot be seen; empty where they can.

        The host's /proc mounted into a namespace of ours names us by another id than we have. In
        the host's namespace number 2 is the kernel's. Elsewhere number 1 tells: is it one of our
        own container, this is the container's namespace.
        """
        with contextlib.suppress(OSError):
            if (self._root / "self").readlink().name != str(os.getpid()):
                return _NO_HOST_PID
        if _read(self._root / "2/comm") == "kthreadd\n":
            return ""
        first, own = _read(self._root / "1/cgroup"), _read(self._root / "self/cgroup")
        if first is None:
            return "processes of others cannot be seen: /proc is not readable"
        if first == own:
            return _NO_HOST_PID
        return ""

    def _process(self, pid: int, listed_at_s: float) -> ProcessReading:
        if pid == 0:  # one of a namespace that the driver does not show us
            return ProcessReading(SOURCE, pid, known=False)
        # What is read through the open folder is of one process, even if its id is given out again.
        try:
            folder = os.open(self._root / str(pid), os.O_RDONLY | os.O_DIRECTORY)
        except PermissionError:
            return ProcessReading(SOURCE, pid, known=False)
        except OSError:
            return self._gone(pid)
        try:
            command, started_s = _stat(_read_at(folder, "stat"))
            if started_s > listed_at_s + _TICK_S:
                return self._gone(pid)
            whose = owner(_read_at(folder, "cgroup"))
            self._signatures[pid] = _signature(os.fstat(folder))
        except PermissionError:
            return ProcessReading(SOURCE, pid, known=False)
        except OSError:
            return self._gone(pid)
        except ValueError:
            # A kernel that writes its files differently: not understood is not nobody's.
            return ProcessReading(SOURCE, pid, known=False)
        finally:
            os.close(folder)
        return ProcessReading(SOURCE, pid, sys.intern(command), whose.pods, whose.container_id)

    def _gone(self, pid: int) -> ProcessReading:
        """It ended since it was listed, so what it held then was its last owner's."""
        last = self._last.get(pid)
        pods, container_id = NOBODY.pods, NOBODY.container_id
        if last is not None:
            pods, container_id = last.pods, last.container_id
        return ProcessReading(SOURCE, pid, "", pods, container_id)


def _signature(folder: os.stat_result) -> int:
    """Identity of a process's directory: another process with this pid has another inode."""
    return folder.st_ino << 64 | folder.st_ctime_ns


def _stat(text: str) -> tuple[str, float]:
    """Command and start, in seconds since boot. Raises ``ValueError``."""
    # The command stands in parentheses and may contain some.
    head, end, tail = text.rpartition(")")
    values = tail.split()
    if not end or len(values) < 20:
        raise ValueError("not a stat file")
    return head.partition("(")[2], int(values[19]) / _TICKS_PER_S


def _read_at(folder: int, name: str) -> str:
    file = os.open(name, os.O_RDONLY, dir_fd=folder)
    try:
        return os.read(file, _MOST_BYTES).decode("utf-8", "replace")
    finally:
        os.close(file)


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return None
