"""Freezes the processes of a container, so that it looks hung until the kubelet replaces it."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tests.install.cluster import Machine, Plane, until
from tests.kubelet.node_objects import is_ready


def freeze(
    plane: Plane, machines: Sequence[Machine], path: str, container: str
) -> dict[str, float]:
    """Send SIGSTOP to the processes of a container. ``path`` is the API path of its pod.

    Return the seconds until the pod becomes unready, until the container runs again, and until the
    pod is ready again.
    """
    name = path.rpartition("/")[2]
    (process,) = (
        running.process
        for machine in machines
        for running in machine.runtime.running(name).values()
        if running.config.metadata.name == container
    )

    def state() -> tuple[bool, int]:
        """Return whether the pod is ready, and its restart count."""
        pod = plane.call("GET", path)
        statuses = pod["status"]["containerStatuses"]
        (of,) = (each for each in statuses if each["name"] == container)
        return is_ready(pod), of["restartCount"]

    restarts = state()[1]
    for pid in _with_descendants(process.pid):
        os.kill(pid, signal.SIGSTOP)
    began_s = time.monotonic()
    seconds: dict[str, float] = {}
    for what, reached in (
        ("unready", lambda: not state()[0]),
        ("restarted", lambda: state()[1] > restarts),
        ("ready", lambda: state()[0]),
    ):
        until(reached, f"{name}: {what}")
        seconds[what] = round(time.monotonic() - began_s, 1)
    return seconds


def _with_descendants(pid: int) -> list[int]:
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        for children in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                todo += map(int, children.read_text().split())
    return found
