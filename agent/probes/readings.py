"""What a probe is: one method, whose readings each name where they were learned.

A probe degrades alone. What it cannot read it leaves out, or says in a ``Degraded``; it never makes
a value up, never stops another probe and never raises.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from agent.probes.nvml import Memory
from contract.gpunode import Sharing


@dataclass(frozen=True, slots=True)
class DriverReading:
    """Whether the node has a driver; ``why_not`` is empty where it has."""

    source: str
    version: str = ""
    why_not: str = ""
    cuda_version: str = ""
    #: The driver went or was replaced under us: only a new process can talk to the next one.
    gone: bool = False


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
    #: The N of /dev/nvidiaN; None where the driver does not tell.
    minor: int | None = None


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


# What the survey of the devices (agent.probes.device_probe) reads besides memory and processes.


@dataclass(frozen=True, slots=True)
class FactsReading:
    """What a device is; empty or None where nobody tells."""

    source: str
    uuid: str
    pci_bus_id: str = ""
    architecture: str = ""
    compute_mode: str = ""
    #: The host's NUMA node that the device hangs on, as the device plugin tells the kubelet.
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class ActivityReading:
    """How busy a device is, all ratios 0..1; None where ``source`` does not measure it."""

    #: Who measured ``sm_ratio``: dcgm, gpm or nvml-process.
    source: str
    uuid: str
    #: Share of SM cycles with a warp assigned.
    sm_ratio: float | None = None
    #: Share of the SMs' warp slots in use.
    occupancy_ratio: float | None = None
    #: Share of time in which any kernel ran: not SM activity.
    utilization_ratio: float | None = None
    #: pid -> its share of SM time; empty where nobody tells processes apart.
    sm_by_pid: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HealthIssueReading:
    """Why nothing should be placed on a device, and since when (RFC 3339) that is known."""

    uuid: str
    reason: str
    since: str


@dataclass(frozen=True, slots=True)
class SourceReading:
    """How one source of the truth fared; ``message`` is constant while the cause is."""

    source: str
    state: Literal["ok", "degraded", "absent"] = "ok"
    message: str = ""


# By whom: what kubelet, plugin and processes tell.


@dataclass(frozen=True, slots=True)
class HoldingReading:
    """A container holds a replica, as the kubelet has it."""

    source: str
    #: Empty where only the name is known.
    uid: str
    container: str
    resource: str
    replica: str
    #: Both empty where only the uid is known.
    namespace: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class RegisteredReading:
    """The healthy replicas of one resource, taken or not, as the plugin told the kubelet."""

    source: str
    resource: str
    healthy: frozenset[str]


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """How the plugin told a container its devices when it was admitted."""

    source: str
    resource: str
    #: As DEVICE_LIST_STRATEGY names them.
    strategies: frozenset[str]
    mps: bool


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """Whose a process is. Its pods are outermost first: a cluster can run inside a pod."""

    source: str
    pid: int
    #: Empty where it went before it could be looked at.
    command: str = ""
    pods: tuple[str, ...] = ()
    container_id: str = ""
    #: Whether it can be said at all that no pod has it.
    known: bool = True


@dataclass(frozen=True, slots=True)
class LimitReading:
    """What the driver grants one container on one device, and what that uses; None: no limit."""

    source: str
    device: str
    #: As cgroups name the pod: of a static one, its hash.
    uid: str
    container_id: str
    used_bytes: int
    soft_bytes: int | None = None
    hard_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MirrorReading:
    """A static pod: the hash that kubelet and cgroups know, and the uid that the API knows."""

    source: str
    hash: str
    uid: str
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class PluginReading:
    """The device plugin's configuration as one source tells it; None and empty: not told."""

    source: str
    sharing: Sharing | None = None
    #: Resource as it is advertised -> replicas of each device.
    replicas: Mapping[str, int] | None = None
    allocation_policy: Literal["distributed", "packed"] | None = None
    device_list_strategy: tuple[str, ...] = ()
    fail_requests_greater_than_one: bool | None = None
    #: Whether the container toolkit obeys a pod's own NVIDIA_VISIBLE_DEVICES where the plugin
    #: does not stand in the way.
    toolkit_obeys_environment: bool | None = None
    #: Whether the plugin hands out device files too, whatever the variable says.
    passes_device_specs: bool = False


TOPOLOGY_POLICIES = ("none", "best-effort", "restricted", "single-numa-node")


@dataclass(frozen=True, slots=True)
class TopologyReading:
    """The policy of the kubelet's topology manager."""

    source: str
    policy: str


@dataclass(frozen=True, slots=True)
class SteeredReading:
    """Of this resource the kubelet takes the device that the ledger chose."""

    resource: str


@dataclass(frozen=True, slots=True)
class ObstacleReading:
    """Why resources are not steered, though the node asks for that."""

    reason: str


Reading = (
    DriverReading
    | DeviceReading
    | SharingReading
    | Degraded
    | FactsReading
    | ActivityReading
    | HealthIssueReading
    | SourceReading
    | HoldingReading
    | RegisteredReading
    | AnswerReading
    | ProcessReading
    | LimitReading
    | MirrorReading
    | PluginReading
    | TopologyReading
    | SteeredReading
    | ObstacleReading
)


class Probe(Protocol):
    def read(self) -> Iterable[Reading]:
        """Everything this probe knows now."""
        ...


class Follower(Protocol):
    """A probe that looks closer at what others found."""

    def follow(self, readings: Sequence[Reading]) -> Iterable[Reading]: ...


@dataclass(frozen=True, slots=True)
class ConfiguredSharing:
    """The plugin's sharing as our own flags state it, which wins over what is seen."""

    resource: str
    replicas: int
    sharing: Sharing

    def read(self) -> Iterable[Reading]:
        return [SharingReading("flags", self.resource, self.replicas, self.sharing)]
