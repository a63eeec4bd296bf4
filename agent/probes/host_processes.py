"""Finds the processes that listen on Unix sockets, and reads their files, flags and environment.

The kernel records which process called ``listen`` (SO_PEERCRED, unix(7)). This identifies the
process better than its name: any process can use the name, but only root can create a socket in the
kubelet's directories. Any user may have written a configuration file, so its size and nesting are
limited before it is decoded.
"""

import socket
import struct
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.probes.cause import Cause
from agent.probes.files_inside import read_inside
from agent.probes.readings import SourceReading
from headroom.contract.gpunode import SourceCode

_CREDENTIALS = struct.Struct("3i")
#: A kubelet may take this number of seconds after its start to write its version to the Node's
#: status.
NEW_S = 60.0
#: Timeout of a connection in seconds. A listener with a full queue does not accept immediately.
_CONNECT_S = 1.0
#: Number of calls of ``update`` after which a socket without a listening process is tried again.
_RETRY_EVERY = 12
#: Maximum number of bytes read from a file in /proc.
_MOST_BYTES = 1 << 20
#: Maximum size of a configuration file in bytes. Parsing takes several hundred times this memory,
#: and 3 s for each MiB.
_MOST_FILE_BYTES = 256 << 10
#: Maximum number of decoded files that are kept.
_MOST_DECODED = 32
_MOST_DEPTH = 64
#: Maximum length of a YAML value in characters. YAML has numbers in base 60, and long ones take
#: long to convert.
_MOST_VALUE_CHARS = 4096
#: Maximum number of dots in a line of TOML. Each dot creates a table, whose full name the decoder
#: keeps.
_MOST_DOTS = 64


class Hidden(OSError):
    """The process is outside the agent's PID namespace."""


def listener(path: Path) -> int:
    """Return the process id of the listener in the agent's PID namespace.

    Raises ``OSError`` if no process listens there, and ``Hidden`` if the agent cannot see the
    process.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as client:
        client.settimeout(_CONNECT_S)
        client.connect(str(path))
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(credentials)[0]
    if pid <= 0:
        raise Hidden("it is not in the agent's PID namespace: the agent needs hostPID: true")
    return pid


def identity(path: Path) -> tuple[int, int] | None:
    """Return inode and change time (ns) of a socket, or None if there is no such file.

    If the socket is created again, the values change.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def is_new(path: Path) -> bool:
    """Return whether a socket was created in the last ``NEW_S`` seconds."""
    found = identity(path)
    return found is not None and time.time() - found[1] / 1e9 < NEW_S


@dataclass(frozen=True, slots=True)
class _Listener:
    """The process that listens on a socket. ``pid`` is 0 if no process was found."""

    #: Inode and change time of the socket.
    socket: tuple[int, int]
    pid: int = 0
    #: Start time of the process, because a pid can be reused.
    start: str = ""
    #: Whether the process is outside the agent's PID namespace.
    hidden: bool = False


class SocketListeners:
    """Finds the processes that listen on the sockets of one directory.

    ``root`` is the host's /proc. ``listening`` returns the pid behind a socket, like ``listener``.
    """

    def __init__(self, root: Path, folder: Path, listening: Callable[[Path], int]) -> None:
        self._root = root
        self._folder = folder
        self._listening = listening
        self._cycle = 0
        self._found: dict[Path, _Listener] = {}

    def update(self, names: Iterable[str]) -> None:
        """Find the listeners of all sockets with these names, which may contain wildcards."""
        paths = sorted(path for name in names for path in self._folder.glob(name))
        self._found = {path: found for path in paths if (found := self._listener(path)) is not None}
        self._cycle += 1

    def only(self, name: str, sockets: str, source: str) -> tuple[Path | None, SourceReading]:
        """Return the /proc directory of the only process that listens on these sockets.

        Return None if there is no such process, or if there are several. The state of ``source``
        contains the reason.
        """
        listeners = [each for path, each in self._found.items() if path.match(sockets)]
        if any(each.hidden for each in listeners):
            why = f"{name} is not in the agent's PID namespace: the agent needs hostPID: true"
            return None, SourceReading(source, "degraded", Cause(why, "no_host_pid"))
        match sorted({each.pid for each in listeners if each.start}):
            # A process that is exiting has no command line.
            case [pid] if read_text(self._root / str(pid) / "cmdline"):
                return self._root / str(pid), SourceReading(source)
            case [_]:
                return None, SourceReading(source, "absent", f"{name} is ending")
            case []:
                code: SourceCode = "no_kubelet" if name == "kubelet" else "no_device_plugin"
                why = f"no {name} listens on its socket"
                return None, SourceReading(source, "absent", Cause(why, code))
        why = f"several processes listen as {name}"
        return None, SourceReading(source, "degraded", Cause(why, "several_listeners"))

    def _listener(self, path: Path) -> _Listener | None:
        """Return the process that listens on a socket, or None if there is no socket."""
        if (socket := identity(path)) is None:
            return None
        known = self._found.get(path)
        if known is not None and known.socket == socket:
            # Do not connect again as long as the same process has the same socket.
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
        """Return the start time of a process, or an empty string if it has ended."""
        values = (read_text(self._root / str(pid) / "stat") or "").rpartition(")")[2].split()
        return values[19] if len(values) > 19 else ""


class ConfigFiles:
    """Decodes YAML and TOML files, and decodes a file again only if it changed."""

    def __init__(self) -> None:
        self._decoded: dict[tuple[Path, str], tuple[tuple[int, int, int], Any]] = {}

    def read(self, process: Path, path: str) -> Any:
        """Return a decoded YAML or TOML file. ``path`` is its path as ``process`` sees it.

        Raises ``Unreadable`` and ``ValueError``.
        """
        signature, content = read_inside(process, path, _MOST_FILE_BYTES + 1)
        last = self._decoded.get((process, path))
        if last is None or last[0] != signature:
            if len(content) > _MOST_FILE_BYTES:
                raise ValueError(f"{path} is larger than {_MOST_FILE_BYTES >> 10} KiB")
            read = _decoded(content.decode(), toml=path.endswith(".toml"))
            if len(self._decoded) >= _MOST_DECODED:
                self._decoded.clear()  # The keys contain processes, most of which have ended.
            last = self._decoded[process, path] = (signature, read)
        return last[1]


def _decoded(text: str, toml: bool) -> Any:
    """Decode TOML or YAML. Raises ``ValueError``."""
    if toml:
        if any(line.count(".") > _MOST_DOTS for line in text.splitlines()):
            raise ValueError("too many nested tables in one line")
        try:
            return tomllib.loads(text)
        except RecursionError as err:
            raise ValueError("not TOML") from err
    try:
        import yaml
    except ImportError as err:
        raise ValueError("Python package pyyaml is missing") from err
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader, if it is installed
    depth = 0
    try:
        for event in yaml.parse(text, loader):
            # A few hundred bytes with aliases can expand to gigabytes.
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("aliases are not supported")
            if isinstance(event, yaml.ScalarEvent):
                if event.value == "<<":
                    raise ValueError("merge keys are not supported")
                if len(event.value) > _MOST_VALUE_CHARS:
                    raise ValueError("a value is too long")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            # Each level uses stack, and an overflow would crash the process.
            if depth > _MOST_DEPTH:
                raise ValueError("nested too deeply")
        return yaml.load(text, loader)
    except (yaml.YAMLError, RecursionError, LookupError, AttributeError) as err:
        # LookupError and AttributeError are raised if a value does not match its tag, as in "!!bool
        # maybe".
        raise ValueError("not YAML") from err


def flags_of(process: Path) -> dict[str, str]:
    """Return the flags of a process as ``parse_flags`` does."""
    arguments = (read_text(process / "cmdline") or "").split("\0")[1:]
    return parse_flags(arguments)


def parse_flags(arguments: Sequence[str]) -> dict[str, str]:
    """Parse flags of the forms --name=value and --name value.

    The values of a repeated flag are joined with commas. A flag without a value has an empty value.
    """
    found: dict[str, str] = {}
    # ``arguments`` is empty if the process has ended.
    for argument, after in zip(arguments, [*arguments[1:], ""], strict=False):
        if not argument.startswith("-"):
            continue
        name, equals, value = argument.lstrip("-").partition("=")
        if not equals and not after.startswith("-"):
            value = after
        found[name] = f"{found[name]},{value}" if name in found else value
    return found


def environment_of(process: Path) -> dict[str, str] | None:
    """Return the environment of a process, or None if it cannot be read."""
    text = read_text(process / "environ")
    if text is None:
        return None
    pairs = (pair.partition("=") for pair in text.split("\0") if pair)
    return {name: value for name, _, value in pairs}


def read_text(path: Path) -> str | None:
    """Return at most the first MiB of a file in /proc, or None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
