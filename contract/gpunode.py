"""GPUNode: one object per node, two authors.

Extenders create it and write ``spec`` (the ledger); the agent writes ``status`` (the report).
Every memory figure is int64 bytes; in JSON the names are those of the CRD, without a suffix.
"""

from typing import Literal

import msgspec

from contract.errors import BadReport
from contract.kube import KubeStruct, ObjectMeta

API_VERSION = "headroom.gpu/v1alpha1"
GROUP = "headroom.gpu"
VERSION = "v1alpha1"
PLURAL = "gpunodes"
KIND = "GPUNode"

#: More than any device has had; a figure above it is a mistake, and sums of many stay in int64.
MAX_DEVICE_BYTES = 1 << 44
MAX_DEVICES = 256
MAX_REPLICAS = 1024
#: Sources of a report, by name, that tell which pod holds which device.
HOLDINGS_SOURCES = frozenset({"checkpoint", "podresources"})
#: The one that tells which process belongs to which pod.
PROCESSES_SOURCE = "proc"
#: Flag of a promise: its pod was bound by somebody else, and may be of any size.
ADOPTED = "adopted"
#: Flag of a promise: its pod drew a device without room, and is to leave the node before it starts.
EVICTED = "evicted"
#: Use of a device below this that belongs to no pod we know is charged to nobody. No setting, since
#: extender and agent must say the same of one device.
UNATTRIBUTED_TOLERANCE_BYTES = 64 << 20
#: More strangers than this on one node are counted, not named.
MAX_UNATTRIBUTED_PROCESSES = 64

#: Who measures SM activity, best first. Device utilisation, the share of time in which any kernel
#: ran, is none of them.
SM_SOURCES = ("dcgm", "gpm", "nvml-process")

Sharing = Literal["none", "time-slicing", "mps"]


def memory_field(name: str) -> int:
    """A byte count that may be absent on the wire; absent is -1, which every check refuses."""
    return msgspec.field(default=-1, name=name)


class Replicas(KubeStruct, frozen=True):
    """The shares of one device as the plugin advertises them; an unshared device has one."""

    free: int = 0
    allocated: int = 0
    unhealthy: int = 0

    @property
    def total(self) -> int:
        return self.free + self.allocated + self.unhealthy


class SmActivity(KubeStruct, frozen=True):
    """Share of SM cycles with a warp assigned, 0..1, and who measured it."""

    ratio: float
    source: str = ""
    #: Exponentially weighted over about a minute; None before there is a second sample.
    smoothed_ratio: float | None = None


class Device(KubeStruct, frozen=True):
    """A physical GPU, or one MIG device, as its node's agent saw it."""

    uuid: str
    index: int = -1
    model: str = ""
    kind: Literal["gpu", "mig"] = "gpu"
    #: MIG only: the physical GPU, and the GPU instance whose memory compute instances share.
    parent: str | None = None
    gpu_instance: int | None = None
    numa_node: int | None = None
    #: Physical memory, driver reserve included.
    memory_bytes: int = memory_field("memory")
    #: Kept by the driver.
    reserved_bytes: int = memory_field("reserved")
    #: memory - free - reserved.
    used_bytes: int = memory_field("used")
    #: Used by processes of no known pod; None where the agent cannot attribute processes.
    unattributed_bytes: int | None = msgspec.field(default=None, name="unattributed")
    sm_activity: SmActivity | None = None
    #: Share of the SMs' warp slots in use, 0..1.
    sm_occupancy_ratio: float | None = msgspec.field(default=None, name="smOccupancy")
    #: Share of time in which any kernel ran, 0..1: not SM activity, which one small kernel leaves
    #: near zero.
    utilization_ratio: float | None = msgspec.field(default=None, name="utilization")
    sharing: Sharing = "none"
    #: The extended resource the plugin advertises it under, as in nvidia.com/gpu.
    resource: str = ""
    replicas: Replicas = Replicas()
    healthy: bool = True
    health_reason: str = ""
    #: RFC 3339, when it was first seen unhealthy; empty while it is healthy.
    unhealthy_since: str = ""
    pci_bus_id: str = ""
    architecture: str = ""
    compute_mode: str = ""


class PodUse(KubeStruct, frozen=True):
    """One container on one device: observed, not promised."""

    uid: str
    device: str
    namespace: str = ""
    name: str = ""
    container: str = ""
    replica: str = ""
    #: None where the driver does not tell.
    used_bytes: int | None = msgspec.field(default=None, name="used")
    #: Where the holding of the device was learned, and where the bytes were, as in
    #: "checkpoint,nvml".
    source: str = ""


class ContainerLimit(KubeStruct, frozen=True):
    """What the driver grants one container on one device, and what that uses by its count.

    Only drivers from r615 on have such limits. Their count stands beside that of processes and is
    in no sum with it.
    """

    uid: str
    device: str
    #: As the container runtime numbers it; the kubelet's name where it cannot be another one's.
    container_id: str
    container: str = ""
    namespace: str = ""
    name: str = ""
    used_bytes: int = memory_field("used")
    #: From here on the driver may evict it for others; None where there is no such limit.
    soft_bytes: int | None = msgspec.field(default=None, name="soft")
    #: More is refused to it.
    hard_bytes: int | None = msgspec.field(default=None, name="hard")


class UnattributedProcess(KubeStruct, frozen=True):
    """A process on a device that belongs to no pod we know."""

    device: str
    pid: int
    command: str = ""
    #: None where the driver does not tell.
    used_bytes: int | None = msgspec.field(default=None, name="used")


class Plugin(KubeStruct, frozen=True):
    """The device plugin and the kubelet as the node shows them; what is not known is said."""

    allocation_policy: Literal["distributed", "packed", "unknown"] = "unknown"
    #: As in "envvar" or "cdi-annotations,cdi-cri"; empty where not known.
    device_list_strategy: str = ""
    #: none, best-effort, restricted or single-numa-node; empty where not known.
    topology_manager_policy: str = ""
    #: Whether a container that asks for several shared replicas is refused at admission; None
    #: where not known.
    fail_requests_greater_than_one: bool | None = None
    #: Whether the pod's own NVIDIA_VISIBLE_DEVICES decides which devices it sees.
    pinning: Literal["honoured", "ignored", "unknown"] = "unknown"
    #: Resources of which the kubelet takes the device that the ledger chose.
    steered: list[str] = msgspec.field(default_factory=list)
    #: Why resources of the node are not steered, though it asks for that; empty if nothing is in
    #: the way.
    steering_obstacle: str = ""
    #: Where this was learned, as in "plugin-config,configz".
    source: str = ""


class Source(KubeStruct, frozen=True):
    """One probe of the agent: whether its part of the truth is in the report."""

    name: str
    #: ok; degraded: some of it is missing; absent: all of it, as where nothing serves it here.
    state: Literal["ok", "degraded", "absent"] = "ok"
    #: What is missing and why; constant while the cause is.
    message: str = ""


class Summary(KubeStruct, frozen=True):
    """For the printer columns of kubectl; nothing is decided from it."""

    devices: int = 0
    memory: str = ""
    sharing: str = ""


class Condition(KubeStruct, frozen=True):
    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str = ""


class GPUNodeStatus(KubeStruct, frozen=True):
    #: RFC 3339, when the sample was taken, not when it was written.
    observed_at: str = ""
    devices: list[Device] = msgspec.field(default_factory=list)
    pods: list[PodUse] = msgspec.field(default_factory=list)
    limits: list[ContainerLimit] = msgspec.field(default_factory=list)
    #: The largest strangers; their bytes are in the devices' ``unowned``.
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
        """Whether a pod that is not named has no replica and no process here.

        That takes a source of the holdings, one of the processes, and processes attributed on
        every device that answers; one that does not is fenced, and what is found on it later is
        charged then.
        """
        sound = {source.name for source in self.sources if source.state == "ok"}
        return (
            not HOLDINGS_SOURCES.isdisjoint(sound)
            and PROCESSES_SOURCE in sound
            and all(d.unattributed_bytes is not None for d in self.devices if d.used_bytes >= 0)
        )


class Charge(KubeStruct, frozen=True):
    """What a pod may take of one extended resource of the node."""

    resource: str
    #: Replicas (whole devices where unshared) of the resource that the pod takes.
    count: int
    #: Device uuid -> the most bytes of the pod that can land on it.
    candidates: dict[str, int] = msgspec.field(default_factory=dict)
    #: Those of them that it could not be given when this was written: they are named for their
    #: bytes, because pods bound later can push it there. The others are the prediction.
    beyond: list[str] = msgspec.field(default_factory=list)
    #: Whether the pod's own NVIDIA_VISIBLE_DEVICES decides and not the plugin: then every candidate
    #: is charged, wherever the replica is that the pod is given.
    by_environment: bool = False
    #: Uuid of the device that the agent is to let the kubelet take; empty where the plugin chooses.
    choice: str = ""


class Reservation(KubeStruct, frozen=True):
    """A promise of the ledger to one pod; its key in the map is the pod's uid."""

    namespace: str
    name: str
    charges: list[Charge] = msgspec.field(default_factory=list)
    #: The attempt that wrote it last; changes with every bind, so that a late one is recognised.
    attempt: str = ""
    #: RFC 3339, when that attempt began.
    since: str = ""
    #: ``ADOPTED``, ``EVICTED``.
    flags: list[str] = msgspec.field(default_factory=list)
    #: Of an adopted pod: its own annotation as it was charged, cut short, empty for none. One that
    #: we bound has it in its placement.
    asked: str | msgspec.UnsetType = msgspec.UNSET


class GPUNodeSpec(KubeStruct, frozen=True, gc=True, weakref=True):
    """Referred to weakly by who reads many versions, hence known to the collector."""

    #: Set once the pods already on the node have been charged; before that it takes none.
    initialised: bool = False
    reservations: dict[str, Reservation] = msgspec.field(default_factory=dict)
    #: For the printer column: all that is promised, as a quantity.
    reserved: str = ""
    #: The Node's annotation ``headroom.gpu/device-choice``, for its agent to read here; empty if
    #: the Node has none.
    device_choice: str = ""


class GPUNode(KubeStruct, frozen=True):
    metadata: ObjectMeta
    # By factory: a plain default would not be encoded, and the API server asks for both.
    api_version: str = msgspec.field(default_factory=lambda: API_VERSION)
    kind: str = msgspec.field(default_factory=lambda: KIND)
    spec: GPUNodeSpec = GPUNodeSpec()
    status: GPUNodeStatus | None = None

    @property
    def name(self) -> str:
        return self.metadata.name


_decoder = msgspec.json.Decoder(GPUNode)
_encoder = msgspec.json.Encoder()


def decode_gpunode(body: bytes | msgspec.Raw) -> GPUNode:
    """Read a GPUNode; raises ``BadReport`` naming the field that cannot be read."""
    try:
        return _decoder.decode(body)
    except (ValueError, RecursionError) as err:  # msgspec raises UnicodeDecodeError too
        raise BadReport(f"GPUNode cannot be read: {err}") from err


def encode_gpunode(node: GPUNode) -> bytes:
    return _encoder.encode(node)


class _Reservations(KubeStruct, frozen=True):
    metadata: ObjectMeta
    spec: GPUNodeSpec = GPUNodeSpec()


_reservations_decoder = msgspec.json.Decoder(_Reservations)


def decode_reservations(body: bytes | msgspec.Raw) -> GPUNode:
    """Read a GPUNode without its status: what one author garbles must not hide the other's half.

    Raises ``BadReport`` when the rest cannot be read either.
    """
    try:
        kept = _reservations_decoder.decode(body)
    except (ValueError, RecursionError) as err:  # msgspec raises UnicodeDecodeError too
        raise BadReport(f"GPUNode cannot be read: {err}") from err
    return GPUNode(metadata=kept.metadata, spec=kept.spec)
