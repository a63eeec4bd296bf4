"""Finds the pod and container of each process that the driver lists, from /proc and cgroups.

A cgroup contains only the id of a container. Its name is in the mounts of the process, because the
kubelet mounts the file for the termination message from ``pods/<uid>/containers/<name>/`` into each
container.

The driver lists process ids as the caller's PID namespace shows them. Without ``hostPID`` the agent
sees few or no processes, but the use by the others must not count as unattributed. So the probe
returns no processes and reports its source as degraded.
"""

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

from agent.probes.cause import Cause
from agent.probes.cgroup import owner, pods
from agent.probes.readings import (
    Container,
    DeviceReading,
    ProcessReading,
    Reading,
    SourceReading,
)

SOURCE = "proc"

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: /proc contains start times in ticks, rounded down.
_TICK_S = 1 / _TICKS_PER_S
_MOST_BYTES = 1 << 16
_MOST_MOUNT_BYTES = 1 << 20
#: Maximum number of ancestors that are read to find the first process of a container.
_MOST_ANCESTORS = 32
#: The root of the mount of a container's termination message.
_TERMINATION = re.compile(r".*/pods/(?P<uid>[^/]+)/containers/(?P<name>[^/]+)/[0-9a-f]+")

#: Interval in seconds at which a process that the driver still lists is checked again. Within this
#: time another process could get the same pid only if the kernel had used up all pids.
CHECK_AGAIN_S = 15.0


_NO_HOST_PID = Cause(
    "processes of other containers cannot be seen: the agent needs hostPID: true", "no_host_pid"
)


class ProcessProbe:
    """Reads the processes that devices list.

    ``root`` is the host's /proc. ``boot_s`` returns the seconds since boot. Known processes are
    checked again every ``check_again_s`` seconds.
    """

    def __init__(
        self,
        root: Path,
        boot_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
        check_again_s: float = CHECK_AGAIN_S,
    ) -> None:
        self._root = root
        self._boot_s = boot_s
        self._check_again_s = check_again_s
        self._around: tuple[str, ...] = ()
        #: When all processes were last checked, in seconds since boot.
        self._checked_s = float("-inf")
        #: The last reading of each process of the last sample, taken while it ran, by pid.
        self._last: dict[int, ProcessReading] = {}
        #: The signature of the /proc directory of each process when it was read, by pid.
        self._signatures: dict[int, int] = {}
        #: The containers of the processes in the last sample, by container id.
        self._containers: dict[str, Container] = {}

    def follow(self, readings: Sequence[Reading]) -> Iterable[Reading]:
        """Return a ``ProcessReading`` for each process that a device lists, and the state of the
        source.

        Return only the state if the host's processes cannot be seen.
        """
        # All listed processes have started by now, so a process that started later has a reused
        # pid.
        listed_at_s = self._boot_s()
        pids = {pid for r in readings if isinstance(r, DeviceReading) for pid in r.processes or ()}
        if why := self._why_hidden():
            return [SourceReading(SOURCE, "degraded", why)]
        # The cgroup of process 1 names the pods that contain the node itself, as with kind. Most
        # nodes run in no pod.
        self._around = pods(_read(self._root / "1/cgroup") or "")
        known = self._last
        if listed_at_s - self._checked_s >= self._check_again_s:
            known, self._checked_s = self._unchanged(), listed_at_s
        found = {pid: known.get(pid) or self._process(pid, listed_at_s) for pid in sorted(pids)}
        self._last = {pid: process for pid, process in found.items() if process.command}
        for pid in self._signatures.keys() - self._last.keys():
            del self._signatures[pid]
        self._containers = {
            each.id: self._containers.get(each.id, each)
            for process in self._last.values()
            if (each := process.container).id
        }
        source = SourceReading(SOURCE)
        if not all(process.known for process in found.values()):
            source = SourceReading(SOURCE, "degraded", "no permission to read processes in /proc")
        return [*found.values(), source]

    def _unchanged(self) -> dict[int, ProcessReading]:
        """Return the known processes of pods whose pid was not reused. They are not read again.

        A process never leaves its pod. Processes outside of pods are read again, because their
        command can change.
        """
        return {
            pid: process
            for pid, process in self._last.items()
            if process.pod and self._signatures.get(pid) == self._signature(pid)
        }

    def _signature(self, pid: int) -> int | None:
        """Return the signature of a running process, or None if no process has this pid."""
        try:
            return _signature(os.stat(f"{self._root}/{pid}"))
        except OSError:
            return None

    def _why_hidden(self) -> str:
        """Return why the host's processes are invisible, or an empty string if they are visible.

        Without hostPID, the host's /proc shows a different pid for the agent than its own. In the
        host's namespace, pid 2 is a kernel thread. In another namespace, pid 1 shows which one it
        is: if pid 1 has the agent's cgroup, it is the namespace of the agent's container.
        """
        with contextlib.suppress(OSError):
            if (self._root / "self").readlink().name != str(os.getpid()):
                return _NO_HOST_PID
        if _read(self._root / "2/comm") == "kthreadd\n":
            return ""
        first, own = _read(self._root / "1/cgroup"), _read(self._root / "self/cgroup")
        if first is None:
            return "processes of other containers cannot be seen: /proc is not readable"
        if first == own:
            return _NO_HOST_PID
        return ""

    def _process(self, pid: int, listed_at_s: float) -> ProcessReading:
        """Read a process that the driver listed at ``listed_at_s`` (seconds since boot)."""
        if pid == 0:  # The process is in a PID namespace that the agent cannot see.
            return ProcessReading(SOURCE, pid, known=False)
        # Files read through the open directory belong to one process, even if the pid is reused.
        try:
            folder = os.open(self._root / str(pid), os.O_RDONLY | os.O_DIRECTORY)
        except PermissionError:
            return ProcessReading(SOURCE, pid, known=False)
        except OSError:
            return self._gone(pid)
        try:
            command, parent, started_s = _stat(_read_at(folder, "stat"))
            if started_s > listed_at_s + _TICK_S:
                return self._gone(pid)
            uid, container_id = owner(_read_at(folder, "cgroup"), self._around)
            container = self._container(folder, uid, container_id, parent, started_s)
            self._signatures[pid] = _signature(os.fstat(folder))
        except PermissionError:
            return ProcessReading(SOURCE, pid, known=False)
        except OSError:
            return self._gone(pid)
        except ValueError:
            # The file format is unknown, so the process may have an owner that cannot be read.
            return ProcessReading(SOURCE, pid, known=False)
        finally:
            os.close(folder)
        return ProcessReading(SOURCE, pid, sys.intern(command), uid, container=container)

    def _container(
        self, process: int, uid: str, container_id: str, parent: int, started_s: float
    ) -> Container:
        """Return the container of a process whose /proc directory is open as ``process``.

        ``parent`` is the pid of its parent, and ``started_s`` its start in seconds since boot.
        """
        if not container_id:
            return Container("")
        known = self._containers.get(container_id)
        if known is None:
            name = container_name(process, uid)
            known = Container(container_id, name, self._oldest_s(parent, container_id, started_s))
        elif started_s < known.started_s:
            known = replace(known, started_s=started_s)
        self._containers[container_id] = known
        return known

    def _oldest_s(self, pid: int, container_id: str, started_s: float) -> float:
        """Return the earliest start of a process and its ancestors in the same container.

        ``pid`` is the parent of the process. The oldest ancestor is usually the first process of
        the container.
        """
        for _ in range(_MOST_ANCESTORS):
            cgroup, stat = _read(self._root / str(pid) / "cgroup"), self._root / str(pid) / "stat"
            if cgroup is None or owner(cgroup, self._around)[1] != container_id:
                break
            try:
                _, pid, parent_started_s = _stat(_read(stat) or "")
            except ValueError:
                break
            started_s = min(started_s, parent_started_s)
        return started_s

    def _gone(self, pid: int) -> ProcessReading:
        """Return the reading of a process that has ended since it was listed, with its last
        owner."""
        last = self._last.get(pid)
        if last is None:
            return ProcessReading(SOURCE, pid)
        return ProcessReading(SOURCE, pid, "", last.pod, container=last.container)


def _signature(folder: os.stat_result) -> int:
    """Return the identity of a /proc directory, which changes if the pid is reused."""
    return folder.st_ino << 64 | folder.st_ctime_ns


def _stat(text: str) -> tuple[str, int, float]:
    """Parse /proc/PID/stat, and return the command, the parent, and the start in seconds since
    boot.

    Raises ``ValueError``.
    """
    # The command is enclosed in parentheses and may itself contain parentheses.
    head, end, tail = text.rpartition(")")
    values = tail.split()
    if not end or len(values) < 20:
        raise ValueError("not a stat file")
    return head.partition("(")[2], int(values[1]), int(values[19]) / _TICKS_PER_S


def container_name(process: int, uid: str) -> str:
    """Return the name of a process's container in the pod ``uid``, or an empty string if it is not
    found.

    ``process`` is the process's open /proc directory.
    """
    try:
        file = os.open("mountinfo", os.O_RDONLY, dir_fd=process)
        with open(file, "rb") as mounts:
            text = mounts.read(_MOST_MOUNT_BYTES).decode("utf-8", "replace")
    except OSError:  # no permission, or the process has ended
        return ""
    for line in text.splitlines():
        fields = line.split(" ", 4)
        found = _TERMINATION.fullmatch(fields[3]) if len(fields) > 4 else None
        if found and found["uid"] == uid:
            return found["name"]
    return ""


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
