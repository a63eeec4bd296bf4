"""Finds the process that listens on a Unix socket.

The kernel records the process that called ``listen`` (SO_PEERCRED, unix(7)). Any process can use
the name of another one, but only root can create a socket in the kubelet's directories.
"""

import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")
#: Timeout in seconds: a listener with a full queue does not accept at once.
_CONNECT_S = 1.0


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
