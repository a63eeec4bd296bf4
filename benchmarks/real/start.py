"""Starts the extenders that benchmarks compare, on a running control plane."""

import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tests.controlplane import (
    ROOT,
    ControlPlane,
    built,
    scheduler_configuration,
)
from tests.kubernetes_version import scheduler_flags

PATIENCE_S = 60.0


def start_scheduler(
    plane: ControlPlane,
    extender_url: str | None,
    config: Mapping[str, Any],
    *,
    flags: Sequence[str] | None = None,
    binary: str = "kube-scheduler",
    extender: Mapping[str, Any] | None = None,
) -> None:
    """Start kube-scheduler as the documentation describes, except for ``config`` and ``extender``.

    If ``flags`` is None, it gets the shipped flags.
    """
    flags = scheduler_flags(binary) if flags is None else flags
    kubeconfig = plane.kubeconfig("scheduler-of-the-tests")
    content = scheduler_configuration(extender_url or "", kubeconfig)
    content["extenders"] = [
        each | dict(extender or {}) for each in content["extenders"] if extender_url
    ]
    for key, value in config.items():
        content[key] = content[key] | value if isinstance(value, dict) else value
    file = plane.folder / f"benchmark-{binary}.json"
    file.write_bytes(msgspec.json.encode(content))
    plane.spawn(binary, str(built(binary)[binary]), f"--config={file}", "--secure-port=0", *flags)


def start_nothing(plane: ControlPlane, port: int, *flags: str) -> str:
    """Start ``benchmarks.real.nothing``; return its address once it listens there."""
    plane.spawn(
        "nothing",
        *(sys.executable, "-m", "benchmarks.real.nothing", "--port", str(port)),
        *("--api", plane.url, "--ca", str(plane.ca_file)),
        *("--token", "extender-of-the-tests", *flags),
        env={"PYTHONPATH": str(ROOT)},
    )
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            plane.raise_if_ended()
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
        else:
            return f"http://127.0.0.1:{port}"
