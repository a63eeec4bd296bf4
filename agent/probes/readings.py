"""The interface of a probe and the types of its readings. Each reading names its source.

A probe that fails does not affect the other probes. It omits values that it cannot read, or reports
them in a ``Degraded``. It never invents a value and never raises.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from agent.probes.nvml import Memory
from headroom.contract.gpunode import Sharing


class Reading(msgspec.Struct, frozen=True):
    """Base class of the facts that a probe reads in one sample.

    Readings are structs, because 21 dataclasses would add 15 ms of CPU time to an agent's start.
    """


class DriverReading(Reading, frozen=True):
    """The state of the driver. ``why_not`` is empty if the node has a driver."""

    source: str
    version: str = ""
    why_not: str = ""
    cuda_version: str = ""
    #: Whether the driver was unloaded or replaced while the agent runs. If so, only a new process
    #: can use the driver.
    gone: bool = False


class DeviceReading(Reading, frozen=True):
    """One GPU or MIG device as one source reports it.

    ``fault`` is empty if the device can be trusted, otherwise a ``Cause`` with a ``HealthCode``.
    """

    source: str
    uuid: str
    index: int
    model: str = ""
    kind: Literal["gpu", "mig"] = "gpu"
    #: UUID of the physical GPU, for MIG devices only.
    parent: str | None = None
    #: Number of the GPU instance, for MIG devices only.
    gpu_instance: int | None = None
    memory: Memory | None = None
    #: Bytes of each pid (None if not reported), or None if the driver lists no processes.
    processes: Mapping[int, int | None] | None = None
    fault: str = ""
    #: The N of /dev/nvidiaN, or None if the driver does not report it.
    minor: int | None = None


class PoolReading(Reading, frozen=True):
    """How much host memory a GPU with unified memory may use, according to the node's
    annotation."""

    source: str
    #: Size in bytes. 0 means that it must be computed.
    pool_bytes: int = 0
    #: Why the annotation is invalid. Empty if it is valid.
    error: str = ""


class HostMemoryReading(Reading, frozen=True):
    """The memory of the host in bytes, for a GPU that shares it."""

    source: str
    total_bytes: int
    #: Memory that the kernel can give to processes without swapping.
    available_bytes: int
    #: The part that GPUs may use. If it is 0, it must be computed. If it is None, it is not set.
    pool_bytes: int | None = None
    #: Why this part is unknown although it is set. Empty if it is known.
    pool_error: str = ""


class SharingReading(Reading, frozen=True):
    """How the device plugin shares the node's whole GPUs, with ``replicas`` of each GPU."""

    source: str
    resource: str
    replicas: int
    sharing: Sharing


class Degraded(Reading, frozen=True):
    """Something that could not be read. ``what`` does not change while the cause stays the same.

    If the usual fix for the source does not apply, ``what`` is a ``Cause``, whose code selects
    another fix.
    """

    source: str
    what: str


# More readings about devices (agent.probes.device_probe).


class FactsReading(Reading, frozen=True):
    """Properties of a device. Unknown properties are empty or None."""

    source: str
    uuid: str
    pci_bus_id: str = ""
    architecture: str = ""
    compute_mode: str = ""
    #: The host's NUMA node that the device is attached to, as the plugin reports to the kubelet.
    numa_node: int | None = None
    #: PCI addresses of the GPUs and NVSwitches at the other ends of the device's active NVLinks.
    nvlinks: frozenset[str] = frozenset()


class ActivityReading(Reading, frozen=True):
    """How busy a device is. Ratios are 0..1, or None if ``source`` does not measure them."""

    #: One of dcgm, gpm, nvml-process, dcgm-engine and nvml. The last two measure only the
    #: utilization. A combined reading has the source of ``sm_ratio``, or an empty source if it has
    #: no ``sm_ratio``.
    source: str
    uuid: str
    #: Share of SM cycles with a warp assigned.
    sm_ratio: float | None = None
    #: Share of the SMs' warp slots in use.
    occupancy_ratio: float | None = None
    #: Share of time in which any kernel ran, which is not SM activity.
    utilization_ratio: float | None = None
    #: Share of SM time by pid. Empty if the source does not measure single processes.
    sm_by_pid: Mapping[int, float] = msgspec.field(default_factory=dict)


class HealthIssueReading(Reading, frozen=True):
    """Why no pod should be placed on a device, and since when (RFC 3339)."""

    uuid: str
    reason: str
    since: str
    codes: tuple[str, ...] = ()


class SourceReading(Reading, frozen=True):
    """The state of one source. ``message`` does not change while the cause stays the same.

    ``message`` is a ``Cause`` if the usual fix for the source does not apply.
    """

    source: str
    state: Literal["ok", "degraded", "absent"] = "ok"
    message: str = ""


# Readings of the kubelet, the device plugin and processes.


class HoldingReading(Reading, frozen=True):
    """A replica that a container holds, according to the kubelet."""

    source: str
    #: The pod's uid. Empty if only the name is known.
    uid: str
    container: str
    resource: str
    replica: str
    #: The pod's namespace and name. Both are empty if only the uid is known.
    namespace: str = ""
    name: str = ""


class RegisteredReading(Reading, frozen=True):
    """The healthy replicas of one resource, allocated or not, as the plugin registered them."""

    source: str
    resource: str
    healthy: frozenset[str]


class AnswerReading(Reading, frozen=True):
    """How the plugin passed the devices to a container when the pod was admitted."""

    source: str
    resource: str
    #: The values of DEVICE_LIST_STRATEGY in the plugin's configuration.
    strategies: frozenset[str]
    mps: bool


class Container(msgspec.Struct, frozen=True):
    """One run of a container. A restart gives the container another id."""

    #: The container runtime's id. Empty if the cgroup does not show it.
    id: str
    #: The container's name in the pod. Empty if the name could not be read.
    name: str = ""
    #: When the container started, in seconds since boot.
    started_s: float = 0.0


class ProcessReading(Reading, frozen=True):
    """The pod and the container that a process belongs to."""

    source: str
    pid: int
    #: The command of the process. Empty if the process ended before its command was read.
    command: str = ""
    #: The pod's uid from the name of its cgroup. Empty if the process is in no pod, or is not
    #: ``known``.
    pod: str = ""
    #: Whether the pod of the process could be read.
    known: bool = True
    container: Container = Container("")


class LimitReading(Reading, frozen=True):
    """The driver's limits for one container on one device (None for no limit), and the container's
    use of the device."""

    source: str
    device: str
    #: The pod's uid from the name of its cgroup. For a static pod it is the hash of its manifest.
    uid: str
    container_id: str
    used_bytes: int
    soft_bytes: int | None = None
    hard_bytes: int | None = None


class HighWaterReading(Reading, frozen=True):
    """The maximum number of bytes of a device that a container has ever used, as its cgroup counts
    them."""

    source: str
    device: str
    #: The same uid as in ``LimitReading``.
    uid: str
    container_id: str
    peak_bytes: int


class MirrorReading(Reading, frozen=True):
    """The two uids of a static pod.

    ``hash`` is the uid that the kubelet and the cgroups use. ``uid`` is the uid of the mirror pod
    in the API server.
    """

    source: str
    hash: str
    uid: str
    namespace: str
    name: str


class PluginReading(Reading, frozen=True):
    """The device plugin's configuration from one source. Unknown values are None or empty."""

    source: str
    sharing: Sharing | None = None
    #: Replicas of each device, by resource as advertised.
    replicas: Mapping[str, int] | None = None
    allocation_policy: Literal["distributed", "packed"] | None = None
    device_list_strategy: tuple[str, ...] = ()
    fail_requests_greater_than_one: bool | None = None
    #: Whether the container toolkit is known to ignore NVIDIA_VISIBLE_DEVICES of unprivileged pods.
    toolkit_ignores_environment: bool = False


TOPOLOGY_POLICIES = ("none", "best-effort", "restricted", "single-numa-node")


class TopologyReading(Reading, frozen=True):
    """The policy of the kubelet's topology manager."""

    source: str
    policy: str


class KubeletVersionReading(Reading, frozen=True):
    """Version of the kubelet in the Node's status, such as v1.36.3."""

    version: str


class SteeredReading(Reading, frozen=True):
    """A steered resource, whose devices are allocated as the ledger chose."""

    resource: str


class ObstacleReading(Reading, frozen=True):
    """Why the node's device choice has no effect on all or some resources."""

    reason: str


class PermissionReading(Reading, frozen=True):
    """Whether the agent has the permission to steer, independently of the node's device choice."""

    permitted: bool


class Probe(Protocol):
    def read(self) -> Iterable[Reading]:
        """Return all readings of this probe."""
        ...


class Follower(Protocol):
    """A probe that needs the readings of other probes."""

    def follow(self, readings: Sequence[Reading]) -> Iterable[Reading]:
        """Return more readings. ``readings`` are all readings of this sample so far."""
        ...
