"""Tests that the process that listens on a socket is found on this kernel."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agent.probes.host_processes import listener

_CHILD = """
import socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("listens", flush=True)
sys.stdin.read()
"""


def test_the_listener_in_another_process_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    command = [sys.executable, "-c", _CHILD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"listens\n"
        assert listener(path) == child.pid != os.getpid()
        child.communicate()
    with pytest.raises(ConnectionRefusedError):
        listener(path)


def test_a_socket_with_a_full_queue_is_an_error_within_the_deadline(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as first:
        server.bind(str(path))
        server.listen(0)
        first.connect(str(path))
        with pytest.raises(OSError, match=r"temporarily unavailable|timed out"):
            listener(path)
