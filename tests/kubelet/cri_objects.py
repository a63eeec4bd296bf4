"""Sandboxes and containers of a container runtime, and their representation in CRI."""

import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from tests.forks import Forked

cri, services = grpc.protos_and_services("tests/kubelet/cri.proto")


@dataclass(eq=False)
class Sandbox:
    id: str
    config: Any
    created_ns: int
    address: str = "127.0.0.1"
    ready: bool = True

    def listed(self) -> dict[str, Any]:
        """Return the fields common to list and status."""
        return {
            "id": self.id,
            "metadata": self.config.metadata,
            "state": cri.SANDBOX_READY if self.ready else cri.SANDBOX_NOTREADY,
            "created_at": self.created_ns,
            "labels": dict(self.config.labels),
            "annotations": dict(self.config.annotations),
        }


@dataclass(eq=False)
class Container:
    id: str
    sandbox: Sandbox
    config: Any
    created_ns: int
    started_ns: int = 0
    finished_ns: int = 0
    exit_code: int = 0
    #: ID of the simulated process, or 0 if it does not run.
    pid: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    #: UUIDs of the container's CDI devices.
    cdi_uuids: Sequence[str] = ()
    #: The real process of the container, if the runtime runs its command.
    process: subprocess.Popen[str] | Forked | None = None
    output: str = ""

    @property
    def pod(self) -> str:
        name: str = self.sandbox.config.metadata.name
        return name

    @property
    def name(self) -> str:
        name: str = self.config.metadata.name
        return name

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment as a runtime interprets it. If a name occurs twice, the last value
        applies.
        """
        return {pair.key: pair.value.decode() for pair in self.config.envs}

    @property
    def devices(self) -> list[str]:
        visible = self.environment.get("NVIDIA_VISIBLE_DEVICES", "")
        named = [each for each in visible.split(",") if each not in ("", "void", "none")]
        return list(dict.fromkeys([*named, *self.cdi_uuids]))

    @property
    def state(self) -> int:
        states = (cri.CONTAINER_CREATED, cri.CONTAINER_RUNNING, cri.CONTAINER_EXITED)
        state: int = states[bool(self.started_ns) + bool(self.finished_ns)]
        return state

    def listed(self) -> dict[str, Any]:
        """Return the fields common to list and status."""
        return {
            "id": self.id,
            "metadata": self.config.metadata,
            "image": self.config.image,
            "image_ref": self.config.image.image,
            "image_id": self.config.image.image,
            "state": self.state,
            "created_at": self.created_ns,
            "labels": dict(self.config.labels),
            "annotations": dict(self.config.annotations),
        }
