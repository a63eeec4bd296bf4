"""Defines the data of the modelled device manager: requests of pods, verdicts and the
checkpoint.
"""

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
    #: Whether this is an init container, which ends before the next container starts.
    init: bool = False
    #: Whether this is a sidecar, an init container with ``restartPolicy: Always``.
    sidecar: bool = False
    #: Bytes that the container's process allocates on each of its devices.
    takes_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Pod:
    uid: str
    #: The containers of the pod. Init containers come first, because the kubelet handles them
    #: first.
    containers: tuple[Container, ...]
    name: str = ""
    namespace: str = "default"
    #: Whether the containers wait until the pod passes the gate.
    gated: bool = False


@dataclass(frozen=True, slots=True)
class Preferred:
    """A call of GetPreferredAllocation by the kubelet, without the plugin's answer."""

    available: Ids
    must_include: Ids
    size: int


@dataclass(frozen=True, slots=True)
class Allocated:
    replicas: Ids


Call = Preferred | Allocated


@dataclass(frozen=True, slots=True)
class Verdict:
    """The kubelet's decision about a pod. The reason and message of a rejection appear in the pod's
    status.
    """

    admitted: bool
    reason: str = ""
    message: str = ""


class Rejected(Exception):
    """The kubelet cannot give a container its devices (UnexpectedAdmissionError)."""


class Unaligned(Exception):
    """The topology policy rejects the container (TopologyAffinityError)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The allocation of one container: its replicas by NUMA node (-1 if a device has no NUMA node)
    and the plugin's response.
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
    """The device manager's checkpoint on disk. It can be older than the state in memory."""

    entries: tuple[Entry, ...] = ()
    #: The healthy replicas, or None before the first registration of a plugin.
    registered: Ids | None = None


class Lots(Protocol):
    def preferred(self, plugin: Plugin, call: Preferred) -> Ids:
        """Return the plugin's answer. Raise ``PluginRefused`` if the call fails."""

    def some(self, replicas: Ids, count: int) -> Ids:
        """Return ``count`` replicas in the random order of a Go map."""
