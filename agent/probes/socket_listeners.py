"""Finds the processes that listen on Unix sockets.

The kernel records the process that called ``listen`` (SO_PEERCRED, unix(7)). Any process can use
the name of another one, but only root can create a socket in the kubelet's directories.
"""

import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from agent.probes.process_files import read_text
from agent.probes.readings import SourceReading

_CREDENTIALS = struct.Struct("3i")
#: Timeout in seconds: a listener with a full queue does not accept at once.
_CONNECT_S = 1.0
#: Cycles before a socket that no process listens on is tried again.
_RETRY_EVERY = 12


class Hidden(OSError):
    """The process is outside our PID namespace."""


def listener(path: Path) -> int:
    """Return the process id of the listener, in the agent's PID namespace.

    Raises ``OSError`` if no process listens there, and ``Hidden`` if the process cannot be seen.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as client:
        client.settimeout(_CONNECT_S)
        client.connect(str(path))
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(credentials)[0]
    if pid <= 0:
        raise Hidden("it is not in the agent's PID namespace: the agent needs hostPID: true")
    return pid


@dataclass(frozen=True, slots=True)
class _Listener:
    """The process that listens on one socket, or why there is none."""

    #: Inode and time of change of the socket.
    socket: tuple[int, int]
    pid: int = 0
    #: Start time of the process, because a pid can be reused.
    start: str = ""
    #: Whether the process is outside the agent's PID namespace.
    hidden: bool = False


class SocketListeners:
    """The processes behind the sockets of one folder.

    ``root`` is the host's /proc. ``listening`` returns the pid behind a socket, like ``listener``.
    """

    def __init__(self, root: Path, folder: Path, listening: Callable[[Path], int]) -> None:
        self._root = root
        self._folder = folder
        self._listening = listening
        self._cycle = 0
        self._found: dict[Path, _Listener] = {}

    def update(self, names: Iterable[str]) -> None:
        """Find the listeners of all sockets with these names, which may have wildcards."""
        paths = sorted(path for name in names for path in self._folder.glob(name))
        self._found = {path: found for path in paths if (found := self._listener(path)) is not None}
        self._cycle += 1

    def only(self, name: str, sockets: str, source: str) -> tuple[Path | None, SourceReading]:
        """Return the /proc directory of the only process that listens on these sockets.

        None if there is no such process or several; the state of ``source`` has the reason.
        """
        listeners = [each for path, each in self._found.items() if path.match(sockets)]
        if any(each.hidden for each in listeners):
            why = f"{name} is not in the agent's PID namespace: the agent needs hostPID: true"
            return None, SourceReading(source, "degraded", why)
        match sorted({each.pid for each in listeners if each.start}):
            # A process that is ending has no command line.
            case [pid] if read_text(self._root / str(pid) / "cmdline"):
                return self._root / str(pid), SourceReading(source)
            case [_]:
                return None, SourceReading(source, "absent", f"{name} is ending")
            case []:
                return None, SourceReading(source, "absent", f"no {name} listens on its socket")
        return None, SourceReading(source, "degraded", f"several processes listen as {name}")

    def _listener(self, path: Path) -> _Listener | None:
        """Return the process that listens on a socket; None if there is no socket."""
        try:
            there = path.stat()
        except OSError:
            return None
        socket = (there.st_ino, there.st_ctime_ns)
        known = self._found.get(path)
        if known is not None and known.socket == socket:
            # Do not connect again while the same process has the same socket.
            if known.pid and self._start(known.pid) == known.start:
                return known
            if not known.pid and self._cycle % _RETRY_EVERY:
                return known
        try:
            pid = self._listening(path)
        except Hidden:
            return _Listener(socket, hidden=True)
        except OSError:
            return _Listener(socket)
        return _Listener(socket, pid, self._start(pid))

    def _start(self, pid: int) -> str:
        """Return the start time of a process; empty if it has ended."""
        values = (read_text(self._root / str(pid) / "stat") or "").rpartition(")")[2].split()
        return values[19] if len(values) > 19 else ""
