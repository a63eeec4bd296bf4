"""The closed list of reasons of Headroom's Kubernetes Events.

`make docs` writes docs/reference/events.md from the descriptions.
"""

from enum import StrEnum


class EventReason(StrEnum):
    """A reason, which ``kubectl get events --field-selector reason=...`` selects.

    ``on`` is the kind of the object, and ``when`` describes the cause. ``repeated`` describes when
    Headroom writes another Event or updates the same Event, and is empty if it does neither.
    """

    on: str
    when: str
    repeated: str

    def __new__(cls, reason: str, on: str, when: str, repeated: str = "") -> "EventReason":
        self = str.__new__(cls, reason)
        self._value_ = reason
        self.on, self.when, self.repeated = on, when, repeated
        return self

    NO_GPU_FITS = (
        "NoGPUFits",
        "Pod",
        "The pod fits on no node. The text names the GPU that comes closest, with the memory that "
        "it lacks, and an annotation that is missing. kube-scheduler's Event `FailedScheduling` "
        "has the number of nodes for each reason.",
        "in the same Event when its text changes, at most once a minute",
    )
    OVERCOMMITTED = (
        "Overcommitted",
        "Pod",
        "The pod has no reservation, and its node does not have enough free GPU memory.",
    )
    REQUEST_CHANGE_IGNORED = (
        "RequestChangeIgnored",
        "Pod",
        "An annotation of the pod was changed after the pod was bound. The reservation stays.",
        "for each change",
    )
    GPU_MEMORY_OVERUSE = (
        "GPUMemoryOveruse",
        "Pod",
        "The pod has used more memory than it requested for longer than setting `overuse_after_s`.",
        "when the overuse has doubled",
    )
    GPU_MEMORY_OVERUSE_EVICTION = (
        "GPUMemoryOveruseEviction",
        "Pod",
        "The pod uses more than it reserved, other pods lack memory, and it is evicted within "
        "seconds: [overuse.md](../how-to/overuse.md).",
        "for each decision",
    )
    EVICTED_FOR_GPU_MEMORY_OVERUSE = (
        "EvictedForGPUMemoryOveruse",
        "Pod",
        "The pod was evicted because it used more than it reserved.",
    )
    CRASHED_ON_OVERCOMMITTED_GPU = (
        "CrashedOnOvercommittedGPU",
        "Pod",
        "A container of the pod ended with an error while its GPU was overcommitted, so CUDA "
        "probably reported out of memory: "
        "[cuda-out-of-memory.md](../operate/cuda-out-of-memory.md). The text names pods of the "
        "same namespace only.",
        "for each end of a container",
    )
    INSUFFICIENT_GPU_MEMORY = (
        "InsufficientGPUMemory",
        "Pod",
        "The pod got a GPU without enough free memory. It is evicted, or waits at its gate if it "
        "cannot be evicted.",
    )
    EVICTED_WITH_GROUP = (
        "EvictedWithGroup",
        "Pod",
        "The pod was evicted with all bound pods of its group, because the group lacked pods for "
        "longer than setting `evict_partial_groups_after_s`: [gangs.md](../how-to/gangs.md).",
    )
    START_TIMED_OUT = (
        "StartTimedOut",
        "Pod",
        "A pod with `headroom.gpu/startup: alone` has not started before its timeout: "
        "[starting-alone.md](../how-to/starting-alone.md).",
    )
    START_STUCK = (
        "StartStuck",
        "Pod",
        "The kubelet cannot start the containers of a pod with `headroom.gpu/startup: alone`.",
    )
    OTHERS_LEAVE_GPU = (
        "OthersLeaveGPU",
        "Pod",
        "Pods of lower priority are evicted from a node for this pod: "
        "[preemption.md](../concepts/preemption.md).",
        "for each decision",
    )
    LEAVES_FOR_GPU_MEMORY = (
        "LeavesForGPUMemory",
        "Pod",
        "The pod is evicted for a pod of higher priority.",
        "for each decision",
    )
    GPU_OVERCOMMITTED = (
        "GPUOvercommitted",
        "Node",
        "Pods without a reservation, or processes outside of known pods, use memory that is "
        "reserved for other pods. The text counts these pods but does not name them.",
        "when the memory is used by other pods or processes than before",
    )
    GPU_UNHEALTHY = (
        "GPUUnhealthy",
        "Node",
        "A GPU of the node is unhealthy and takes no new pods.",
        "each time a GPU fails",
    )
