"""What a probe is: one method, whose readings each name where they were learned.

A probe degrades alone. What it cannot read it leaves out, or says in a ``Degraded``; it never makes
a value up and never stops another probe. The one exception it may raise is ``nvml.DriverGone``,
because then the process has to go.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from agent.nvml import Memory
from contract.gpunode import Sharing


@dataclass(frozen=True, slots=True)
class DriverReading:
    """Whether the node has a driver; ``why_not`` is empty where it has."""

    source: str
    version: str = ""
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One GPU or MIG device as one source saw it; ``fault`` is empty where it may be trusted."""

    source: str
    uuid: str
    index: int
    model: str = ""
    kind: Literal["gpu", "mig"] = "gpu"
    #: MIG only.
    parent: str | None = None
    gpu_instance: int | None = None
    memory: Memory | None = None
    #: pid -> bytes, None where the driver does not tell; None for all where it lists nobody.
    processes: Mapping[int, int | None] | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class SharingReading:
    """How the device plugin shares the node's whole GPUs; ``replicas`` of each of them."""

    source: str
    resource: str
    replicas: int
    sharing: Sharing


@dataclass(frozen=True, slots=True)
class Degraded:
    """Something that should have been read and was not; ``what`` never changes while it lasts."""

    source: str
    what: str


Reading = DriverReading | DeviceReading | SharingReading | Degraded


class Probe(Protocol):
    def read(self) -> Iterable[Reading]:
        """Everything this probe knows now."""
        ...


@dataclass(frozen=True, slots=True)
class ConfiguredSharing:
    """The plugin's sharing as our own flags state it.

    First cut: nothing reads the plugin's real state yet, so every replica is reported free, which
    makes every device a candidate, and MIG devices get no resource.
    """

    resource: str
    replicas: int
    sharing: Sharing

    def read(self) -> Iterable[Reading]:
        return [SharingReading("flags", self.resource, self.replicas, self.sharing)]
