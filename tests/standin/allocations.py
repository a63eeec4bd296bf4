"""Requests of pods to the modelled device manager, its answers and its records."""

from dataclasses import dataclass
from typing import Protocol

from tests.standin.plugin import Plugin

RESOURCE = "nvidia.com/gpu"
Ids = frozenset[str]
NONE: Ids = frozenset()


@dataclass(frozen=True, slots=True)
class Container:
    name: str
    replicas: int = 0
    #: Runs to its end before those after it begin.
    init: bool = False
    #: An init container that stays (``restartPolicy: Always``).
    sidecar: bool = False
    #: Bytes that its process takes of each of its devices.
    takes_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Pod:
    uid: str
    #: Init containers first, as in the kubelet's loops.
    containers: tuple[Container, ...]
    name: str = ""
    namespace: str = "default"
    #: Whether its containers wait until it is let through.
    gated: bool = False


@dataclass(frozen=True, slots=True)
class Preferred:
    """The kubelet's call of GetPreferredAllocation; what was answered is the plugin's choice."""

    available: Ids
    must_include: Ids
    size: int


@dataclass(frozen=True, slots=True)
class Allocated:
    replicas: Ids


Call = Preferred | Allocated


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the kubelet admits a pod; reason and message of a rejection are in the status."""

    admitted: bool
    reason: str = ""
    message: str = ""


class Rejected(Exception):
    """A container does not get what it asks for: UnexpectedAdmissionError."""


class Unaligned(Exception):
    """The topology policy does not admit the container: TopologyAffinityError."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The allocation of one container: its replicas by NUMA node (-1: none), and the answer."""

    uid: str
    container: str
    by_numa: tuple[tuple[int, Ids], ...]
    environment: tuple[tuple[str, str], ...]

    @property
    def replicas(self) -> Ids:
        return frozenset(each for _, ids in self.by_numa for each in ids)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The record on the disk: as of the last write, which is not always as of now."""

    entries: tuple[Entry, ...] = ()
    #: The healthy replicas; None before a plugin has ever registered.
    registered: Ids | None = None


class Lots(Protocol):
    def preferred(self, plugin: Plugin, call: Preferred) -> Ids:
        """The plugin's answer; raises ``PluginRefused``."""

    def some(self, replicas: Ids, count: int) -> Ids:
        """So many of them: those that Go's map gives first."""
