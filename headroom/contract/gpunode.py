"""The GPUNode object. Each GPU node has one GPUNode.

Extenders create it and write ``spec`` (the ledger). The agent writes ``status`` (the report).
Memory is int64 bytes. The JSON names are the names in the CRD, which lack the suffix ``_bytes``.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from headroom.contract.device_names import device_name
from headroom.contract.kube import KubeStruct, ObjectMeta

API_VERSION = "headroom.gpu/v1alpha1"
GROUP = "headroom.gpu"
VERSION = "v1alpha1"
PLURAL = "gpunodes"
KIND = "GPUNode"

MAX_DEVICES = 256
MAX_REPLICAS = 1024
#: Maximum number of characters of versions, policies and strategies in a report.
MAX_WORD = 64
#: Names of the sources that report which pod holds which device.
HOLDINGS_SOURCES = frozenset({"checkpoint", "podresources"})
#: Name of the source that reports which process belongs to which pod.
PROCESSES_SOURCE = "proc"
#: Flag of a reservation that was made after the pod was bound without a reservation. It may
#: overcommit a device.
ADOPTED = "adopted"
#: Flag of an adopted reservation whose pod holds its devices by a ResourceClaim (DRA). The amount
#: that the claim holds is reserved.
CLAIMED = "claimed"
#: Flag of a reservation whose pod got a device without enough free memory. Headroom evicts the pod
#: before it starts.
EVICTED = "evicted"
#: Phases of the reservation of a pod that starts alone (annotation ``headroom.gpu/startup``).
STARTING: Final = "starting"
RUNNING: Final = "running"
#: Unattributed use of a device up to this number of bytes is ignored. Extender and agent must use
#: the same value.
UNATTRIBUTED_TOLERANCE_BYTES = 64 << 20
#: Maximum number of unattributed processes listed per node. Processes that are not listed count in
#: the sums.
MAX_UNATTRIBUTED_PROCESSES = 64

#: Sources of SM activity, best first. Device utilisation (the share of time in which any kernel
#: ran) is not SM activity.
SM_SOURCES = ("dcgm", "gpm", "nvml-process")

Sharing = Literal["none", "time-slicing", "mps"]

#: Why a device is unhealthy. ``other`` also stands for causes that only newer agents distinguish.
HealthCode = Literal[
    "xid",
    "lost",
    "reset_required",
    "recovery",
    "ecc",
    "remap",
    "retirement",
    "hang",
    "driver",
    "memory",
    "mig",
    "identity",
    "nvml",
    "other",
]
#: Why a source lacks data, if the usual fix for this source does not apply.
SourceCode = Literal[
    "maintenance",
    "gpu_operator",
    "gpu_not_listed",
    "mig",
    "no_host_pid",
    "no_ptrace",
    "no_cgroups",
    "no_checkpoint",
    "no_device_plugin",
    "gke_plugin",
    "no_kubelet",
    "several_listeners",
    "k3s",
]


def memory_field(name: str) -> int:
    """Return a msgspec field for bytes, named ``name`` in JSON. If it is omitted, it is -1
    (unknown)."""
    return msgspec.field(default=-1, name=name)


class Replicas(KubeStruct, frozen=True):
    """The replicas of one device that the plugin advertises. An unshared device has one replica."""

    free: int = 0
    allocated: int = 0
    unhealthy: int = 0

    @property
    def total(self) -> int:
        return self.free + self.allocated + self.unhealthy


class SmActivity(KubeStruct, frozen=True):
    """SM activity: the share of cycles in which an SM has a warp assigned, 0..1."""

    ratio: float
    #: One of ``SM_SOURCES``.
    source: str = ""
    #: Exponentially weighted mean over about a minute, or None before the second sample.
    smoothed_ratio: float | None = None


class Device(KubeStruct, frozen=True):
    """A physical GPU or a MIG device, as the node's agent reports it."""

    uuid: str
    index: int = -1
    model: str = ""
    kind: Literal["gpu", "mig"] = "gpu"
    #: UUID of the physical GPU, and id of the GPU instance whose memory its compute instances
    #: share. Set only for MIG devices.
    parent: str | None = None
    gpu_instance: int | None = None
    numa_node: int | None = None
    #: Number of the set of GPUs that NVLink connects with this GPU, directly or through NVSwitches,
    #: or None if the GPU has no active NVLink.
    nvlink_group: int | None = None
    #: Physical memory, including the driver's reserve.
    memory_bytes: int = memory_field("memory")
    #: Memory that the driver reserves.
    reserved_bytes: int = memory_field("reserved")
    #: Computed as memory - free - reserved.
    used_bytes: int = memory_field("used")
    #: Bytes used by processes outside of known pods, or None if the agent cannot attribute
    #: processes.
    unattributed_bytes: int | None = msgspec.field(default=None, name="unattributed")
    sm_activity: SmActivity | None = None
    #: Share of the SMs' warp slots in use, 0..1.
    sm_occupancy_ratio: float | None = msgspec.field(default=None, name="smOccupancy")
    #: Share of time in which any kernel ran, 0..1. A single small kernel keeps it high while SM
    #: activity is near zero.
    utilization_ratio: float | None = msgspec.field(default=None, name="utilization")
    sharing: Sharing = "none"
    #: The extended resource under which the plugin advertises the device, such as nvidia.com/gpu.
    resource: str = ""
    replicas: Replicas = Replicas()
    healthy: bool = True
    health_reason: str = ""
    #: Each code is a ``HealthCode``, or a code that only newer agents have.
    health_codes: list[str] = msgspec.field(default_factory=list)
    #: When the device was first seen unhealthy (RFC 3339). Empty while it is healthy.
    unhealthy_since: str = ""
    pci_bus_id: str = ""
    architecture: str = ""
    compute_mode: str = ""

    @property
    def name(self) -> str:
        """The name for users, unique on the node."""
        return device_name(self.uuid, self.index, self.kind)

    @property
    def is_closed_by_mode(self) -> bool:
        """Whether pods fail on the device because of its compute mode.

        They do if no process may use it, or if only one process may use it and time slicing shares
        it. With MPS, exclusive mode is correct, because only the MPS server uses the device.
        """
        if self.compute_mode == "prohibited":
            return True
        return self.compute_mode.startswith("exclusive") and self.sharing == "time-slicing"


class PodUse(KubeStruct, frozen=True):
    """The observed use of a device by a container. Reservations are in ``spec``."""

    uid: str
    device: str
    namespace: str = ""
    name: str = ""
    container: str = ""
    replica: str = ""
    #: None if the driver does not report the use.
    used_bytes: int | None = msgspec.field(default=None, name="used")
    #: The sources of the device and of the bytes, such as "checkpoint,nvml".
    source: str = ""
    #: Maximum use in this life of the container, including ended processes. A life begins whenever
    #: the container starts or restarts. None if the use was not measured.
    peak_bytes: int | None = msgspec.field(default=None, name="peak")
    #: Maximum use until ``settled_at``, or until now if ``settled_at`` is empty. None if the agent
    #: did not measure the start of this life.
    startup_peak_bytes: int | None = msgspec.field(default=None, name="startupPeak")
    #: With ``driver``, the peak is the high-water mark of the container's cgroup. With ``nvml``, it
    #: is the maximum of the samples, which misses peaks between two samples. Empty if there is no
    #: peak.
    peak_source: Literal["", "driver", "nvml"] = ""
    #: Whether samples were missed while the container ran, so that the true peak may be higher.
    peak_partial: bool = False
    #: Start of this life (RFC 3339). Empty before the first process uses the device.
    started_at: str = ""
    #: When the use first settled in this life (RFC 3339), by the rule in ``agent.peaks``. Empty
    #: until then, and if the agent did not measure the start of this life.
    settled_at: str = ""
    #: Since when the pod has used no SM of the device (RFC 3339). Empty if the pod has used SMs in
    #: the last minutes, or if its SM activity is unknown.
    idle_since: str = ""


class ContainerLimit(KubeStruct, frozen=True):
    """The driver's memory limits for one container on one device, and the use that the driver
    measures.

    Drivers support such limits since r615. ``used_bytes`` is the driver's own measurement, and is
    never added to the use of processes in ``PodUse``.
    """

    uid: str
    device: str
    #: The container runtime's id, and the kubelet's container name if it is unambiguous.
    container_id: str
    container: str = ""
    namespace: str = ""
    name: str = ""
    used_bytes: int = memory_field("used")
    #: Soft limit, above which the driver may evict memory for other containers, or None if there is
    #: none.
    soft_bytes: int | None = msgspec.field(default=None, name="soft")
    #: Hard limit, above which allocations fail, or None if there is none.
    hard_bytes: int | None = msgspec.field(default=None, name="hard")


class UnattributedProcess(KubeStruct, frozen=True):
    """A process that uses a device and belongs to no known pod."""

    device: str
    pid: int
    command: str = ""
    #: None if the driver does not report the use.
    used_bytes: int | None = msgspec.field(default=None, name="used")


class Plugin(KubeStruct, frozen=True):
    """Settings of the device plugin and the kubelet that the agent can read."""

    allocation_policy: Literal["distributed", "packed", "unknown"] = "unknown"
    #: For example "envvar" or "cdi-annotations,cdi-cri". Empty if unknown.
    device_list_strategy: str = ""
    #: One of none, best-effort, restricted and single-numa-node. Empty if unknown.
    topology_manager_policy: str = ""
    #: Whether the kubelet rejects a container that requests several shared replicas, or None if
    #: unknown.
    fail_requests_greater_than_one: bool | None = None
    #: Whether it is certain that a pod's NVIDIA_VISIBLE_DEVICES has no effect on its devices.
    ignores_visible_devices: bool = False
    #: Resources for which the kubelet allocates the device that the ledger chose.
    steered: list[str] = msgspec.field(default_factory=list)
    #: Whether the agent gives a container that requests several replicas of a steered resource
    #: different devices.
    steers_several: bool = False
    #: Why the node's device choice has no effect on some or all resources. Empty if it has an
    #: effect on all of them.
    choice_obstacle: str = ""
    #: Whether the agent may write to the kubelet's device plugin directory, which steering
    #: requires, or None if unknown.
    steering_permitted: bool | None = None
    #: Version of the kubelet according to the Node's status, such as v1.36.3. Empty if unknown.
    kubelet_version: str = ""
    #: The sources of these fields, such as "plugin-config,configz".
    source: str = ""


class Source(KubeStruct, frozen=True):
    """One probe of the agent, and whether its data is in the report."""

    name: str
    #: With ``degraded``, a part of its data is missing. With ``absent``, all of its data is
    #: missing, for example because a service is not installed.
    state: Literal["ok", "degraded", "absent"] = "ok"
    #: The missing data and the cause. The text does not change while the cause stays the same.
    message: str = ""
    #: Each code is a ``SourceCode``, or a code that only newer agents have.
    codes: list[str] = msgspec.field(default_factory=list)


class Summary(KubeStruct, frozen=True):
    """Values for kubectl's printer columns, as text for users. No decision depends on them."""

    devices: int = 0
    #: Physical memory, including the driver's reserve, such as ``24.0 GiB``.
    memory: str = ""
    #: Measured use, and the memory that is neither used nor reserved by the driver. Pods may have
    #: reserved memory that is free here. Both are empty if the driver reports the use of no device.
    used: str = ""
    free: str = ""
    sharing: str = ""


class Condition(KubeStruct, frozen=True):
    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str = ""


class GPUNodeStatus(KubeStruct, frozen=True):
    #: When the sample was taken (RFC 3339). It may be written later.
    observed_at: str = ""
    devices: list[Device] = msgspec.field(default_factory=list)
    pods: list[PodUse] = msgspec.field(default_factory=list)
    limits: list[ContainerLimit] = msgspec.field(default_factory=list)
    #: The largest unattributed processes. ``Device.unattributed_bytes`` includes them.
    unattributed_processes: list[UnattributedProcess] = msgspec.field(default_factory=list)
    plugin: Plugin = Plugin()
    sources: list[Source] = msgspec.field(default_factory=list)
    summary: Summary = Summary()
    conditions: list[Condition] = msgspec.field(default_factory=list)
    agent_version: str = ""
    driver_version: str = ""
    cuda_version: str = ""

    @property
    def shows_every_pod(self) -> bool:
        """Return whether a pod that is not in the report has no replica and no process on the node.

        This is true if the agent can read which pod holds which device, and can attribute the
        processes on every device that reports its use. A device that does not report its use is
        unhealthy, and its use counts as soon as it is reported.
        """
        ok_sources = {source.name for source in self.sources if source.state == "ok"}
        return (
            not HOLDINGS_SOURCES.isdisjoint(ok_sources)
            and PROCESSES_SOURCE in ok_sources
            and all(d.unattributed_bytes is not None for d in self.devices if d.used_bytes >= 0)
        )


class ContainerCharge(KubeStruct, frozen=True):
    """The part of a charge for one container."""

    name: str
    #: Number of replicas that the container takes.
    count: int
    #: Maximum number of bytes that the container can use on one device.
    device_bytes: int = msgspec.field(default=0, name="bytes")


class Charge(KubeStruct, frozen=True):
    """The part of a reservation for one extended resource of the node."""

    resource: str
    #: Number of replicas of the resource that the pod takes. An unshared device has one replica.
    count: int
    #: Bytes reserved for the pod on each candidate device, by UUID.
    candidates: dict[str, int] = msgspec.field(default_factory=dict)
    #: UUIDs of candidates that the plugin would not have chosen when this was written. Memory is
    #: reserved on them because a pod that is bound later can take the predicted device first. The
    #: other candidates are the predicted devices.
    beyond: list[str] = msgspec.field(default_factory=list)
    #: Whether the pod's own NVIDIA_VISIBLE_DEVICES, and not the plugin, decides which devices it
    #: uses. If so, memory stays reserved on every candidate, whichever replica the pod gets.
    by_environment: bool = False
    #: UUIDs of the devices that the agent makes the kubelet choose, in the order of the report. A
    #: container that requests n replicas gets n different devices of them. Empty if the plugin
    #: chooses.
    choices: list[str] = msgspec.field(default_factory=list)
    #: The containers, if several containers of the pod request the resource and the plugin chooses
    #: their devices. They can be on different devices.
    containers: list[ContainerCharge] = msgspec.field(default_factory=list)

    def bytes_on(self, device: str, rows: Sequence[PodUse] = ()) -> int:
        """Return the bytes reserved on a device, or the maximum of all candidates if it is not a
        candidate.

        ``rows`` contains all rows of the pod in a report. If they show all replicas of all
        containers, only the containers on the device count.
        """
        whole_bytes = self.candidates.get(device, max(self.candidates.values(), default=0))
        if not self.containers:
            return whole_bytes
        held: dict[str, set[tuple[str, str]]] = {}
        for row in rows:
            if row.replica:
                held.setdefault(row.container, set()).add((row.device, row.replica))
        if any(len(held.get(each.name, ())) < max(1, each.count) for each in self.containers):
            return whole_bytes
        there = [
            each.device_bytes
            for each in self.containers
            if any(on == device for on, _ in held[each.name])
        ]
        return min(whole_bytes, sum(there)) if there else whole_bytes

    @property
    def chosen_replicas(self) -> dict[str, int]:
        """Number of replicas of each chosen device that the pod gets, by UUID.

        If several containers request different numbers of devices, it is unknown which devices each
        container gets. In this case, the first devices are assumed.
        """
        found: Counter[str] = Counter()
        counts = [each.count for each in self.containers] or [self.count]
        while self.choices and (left := self.count - found.total()) > 0:
            count = counts.pop(0) if counts else left
            found.update(self.choices[: max(1, min(count, left))])
        return dict(found)

    @property
    def total_bytes(self) -> int:
        """Maximum number of bytes that the pod can use on all its devices together."""
        most_bytes = max(self.candidates.values(), default=0) * self.count
        if not self.containers:
            return most_bytes
        return min(most_bytes, sum(each.device_bytes * each.count for each in self.containers))


class OveruseEviction(KubeStruct, frozen=True):
    """The decision to evict a pod that uses more memory than it reserved, written before the
    eviction."""

    #: UUID of the device that lacks memory.
    device: str
    #: When it was decided (RFC 3339), and ``observedAt`` of the report that caused the decision.
    #: Only a later report or heartbeat can lead to the eviction.
    since: str = ""
    observed_at: str = ""
    #: When the API server rejected the eviction (RFC 3339). Empty if it did not.
    rejected_at: str = ""


class Reservation(KubeStruct, frozen=True):
    """Memory and replicas reserved for one pod. The key in the map is the pod's uid."""

    namespace: str
    name: str
    charges: list[Charge] = msgspec.field(default_factory=list)
    #: Id of the attempt that wrote it last, which begins with the name of the replica. Each attempt
    #: has a different id, so each write changes the object and a late write of another attempt
    #: fails.
    attempt: str = ""
    #: When this attempt wrote it (RFC 3339).
    since: str = ""
    #: Any of ``ADOPTED``, ``CLAIMED`` and ``EVICTED``.
    flags: list[str] = msgspec.field(default_factory=list)
    #: ``starting`` until the first start of a pod that starts alone has ended or timed out, and
    #: then ``running``, even if the pod starts again. Empty for other pods.
    phase: Literal["", "starting", "running"] = ""
    #: Seconds after ``since`` at which its start times out.
    start_timeout_s: int = msgspec.field(default=0, name="startTimeoutSeconds")
    #: The VRAM annotation that an adopted pod's reservation is based on, shortened. Empty if the
    #: pod had none. Unset for other pods, for which the placement annotation records it.
    asked: str | msgspec.UnsetType = msgspec.UNSET
    #: Set while the pod is to be evicted because of its overuse.
    overuse: OveruseEviction | msgspec.UnsetType = msgspec.UNSET

    @property
    def starts_alone(self) -> bool:
        """Return whether the pod has the annotation ``headroom.gpu/startup``."""
        return self.phase != ""

    @property
    def is_starting(self) -> bool:
        """Return whether no other pod that starts alone may start on a device of this pod."""
        return self.phase == STARTING


class GPUNodeSpec(KubeStruct, frozen=True, gc=True, weakref=True):
    """The ledger of the node. Caches hold weak references to it."""

    #: True when all pods that were already on the node have reservations. Before that, the node
    #: accepts no pods that request a GPU.
    initialised: bool = False
    reservations: dict[str, Reservation] = msgspec.field(default_factory=dict)
    #: The sum of all reservations for the printer column, as text for users (``16.0 GiB``).
    reserved: str = ""
    #: Copy of the Node's annotation ``headroom.gpu/device-choice`` for the agent. Empty if the Node
    #: has no such annotation.
    device_choice: str = ""
    #: Copy of the Node's annotation ``headroom.gpu/cordon`` for the agent: UUIDs of devices, or of
    #: their GPUs, that take no new pods.
    cordoned: list[str] = msgspec.field(default_factory=list)


class GPUNode(KubeStruct, frozen=True):
    metadata: ObjectMeta
    # Factories, because msgspec would omit plain defaults and the API server requires both fields.
    api_version: str = msgspec.field(default_factory=lambda: API_VERSION)
    kind: str = msgspec.field(default_factory=lambda: KIND)
    spec: GPUNodeSpec = GPUNodeSpec()
    status: GPUNodeStatus | None = None

    @property
    def name(self) -> str:
        return self.metadata.name
