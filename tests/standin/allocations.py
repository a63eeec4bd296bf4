"""Data of the modelled device manager: requests of pods, answers and records."""

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
    #: Runs to completion before the next container starts.
    init: bool = False
    #: A sidecar: an init container with ``restartPolicy: Always``.
    sidecar: bool = False
    #: Bytes that the container's process allocates on each of its devices.
    takes_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Pod:
    uid: str
    #: Init containers come first, as in the kubelet's loops.
    containers: tuple[Container, ...]
    name: str = ""
    namespace: str = "default"
    #: Whether the containers wait until the pod passes the gate.
    gated: bool = False


@dataclass(frozen=True, slots=True)
class Preferred:
    """A call of GetPreferredAllocation by the kubelet. The plugin's answer is recorded
    elsewhere.
    """

    available: Ids
    must_include: Ids
    size: int


@dataclass(frozen=True, slots=True)
class Allocated:
    replicas: Ids


Call = Preferred | Allocated


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the kubelet admits a pod. Reason and message of a rejection appear in the status."""

    admitted: bool
    reason: str = ""
    message: str = ""


class Rejected(Exception):
    """The kubelet cannot give a container its devices (UnexpectedAdmissionError)."""


class Unaligned(Exception):
    """The topology policy rejects the container (TopologyAffinityError)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The allocation of one container: its replicas by NUMA node (-1 for none) and the plugin's
    response.
    """

    uid: str
    container: str
    by_numa: tuple[tuple[int, Ids], ...]
    environment: tuple[tuple[str, str], ...]

    @property
    def replicas(self) -> Ids:
        return frozenset(each for _, ids in self.by_numa for each in ids)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The device manager's record on disk as of the last write, which may be older than the state
    in memory.
    """

    entries: tuple[Entry, ...] = ()
    #: The healthy replicas, or None before the first registration of a plugin.
    registered: Ids | None = None


class Lots(Protocol):
    def preferred(self, plugin: Plugin, call: Preferred) -> Ids:
        """Return the plugin's answer. Raise ``PluginRefused`` if the call fails."""

    def some(self, replicas: Ids, count: int) -> Ids:
        """Return ``count`` replicas, the first in the random order of a Go map."""
