"""The closed list of reasons why a pod is unschedulable on a node.

A sentence does not change while its cause lasts, and contains no number, node name or percent sign,
because kube-scheduler counts equal sentences ("3 insufficient GPU memory on any device") and
formats them. If the message of a pod kept changing, kube-scheduler would retry the pod a hundred
times a second. The debug API reports the numbers that belong to a verdict.
"""

from enum import Enum

_AGENT = (
    "check whether the agent runs on the node: kubectl -n headroom-system get pods -o wide; "
    "without its measurements, Headroom reserves no memory there"
)
_FOREIGN_ALLOCATOR = (
    "let only one of them allocate the node's GPUs: remove its scheduler and device plugin from "
    "the node, or remove Headroom's resources from it"
)
_ANNOTATION = "The value cannot be parsed. The webhook's message quotes it."
_ALLOCATED_BY_OTHERS = (
    "Another component allocates GPUs of the node, and neither sees the reservations of the other."
)
_FIX_POD = "correct the annotation in the pod template, and create the pod again"


class Reason(Enum):
    """A reason. ``code`` is its name in lower case, for programs, and ``sentence`` is for users.

    ``meaning`` explains the reason, and ``remedy`` states what to do. The doctor prints the remedy,
    and `make docs` writes both into docs/reference/reasons.md. ``evictable`` states whether
    evicting pods from the node could make the pod fit.
    """

    #: ``Enum.__hash__`` is a slow Python function, and one filter call looks up dozens of reasons.
    __hash__ = object.__hash__

    # Reasons of the pod itself, which fits on no node.
    BAD_VRAM = (
        "annotation headroom.gpu/vram is not valid (example: 8Gi)",
        _ANNOTATION,
        _FIX_POD,
    )
    BAD_VRAM_LIMIT = (
        "annotation headroom.gpu/vram-limit is not valid (example: 20Gi)",
        "The value cannot be parsed, or contradicts the request. The webhook's message quotes it.",
        _FIX_POD,
    )
    BAD_POLICY = (
        "annotation headroom.gpu/policy is not valid (example: pack)",
        _ANNOTATION,
        _FIX_POD,
    )
    BAD_MAX_SM = (
        "annotation headroom.gpu/max-sm is not valid",
        f"{_ANNOTATION} Example: 70%.",
        _FIX_POD,
    )
    BAD_PROCESSES = (
        "annotation headroom.gpu/processes is not valid (example: 1)",
        _ANNOTATION,
        _FIX_POD,
    )
    BAD_ON_OVERUSE = (
        "annotation headroom.gpu/on-overuse is not valid (example: evict)",
        _ANNOTATION,
        _FIX_POD,
    )
    BAD_STARTUP = (
        "annotation headroom.gpu/startup is not valid (example: alone)",
        _ANNOTATION,
        _FIX_POD,
    )
    BAD_STARTUP_TIMEOUT = (
        "annotation headroom.gpu/startup-timeout is not valid (example: 10m)",
        _ANNOTATION,
        _FIX_POD,
    )
    BAD_DEFAULT_VRAM = (
        "annotation headroom.gpu/default-vram of the namespace is not valid (example: 4Gi)",
        "The pod has no headroom.gpu/vram, and the default of its namespace cannot be parsed.",
        "correct the annotation of the namespace",
    )
    BAD_POD = (
        "number of GPUs that the pod asks for cannot be read",
        "A GPU resource of a container has a value that is not a whole number.",
        "correct resources.limits. Example: nvidia.com/gpu: 1",
    )
    POD_TOO_LARGE = (
        "pod has more containers, annotations or node constraints than Headroom accepts",
        "The size of a pod is limited, because each decision reads it. kubectl headroom why shows "
        "the limit that the pod exceeds.",
        "use fewer containers, annotations or node selector terms",
    )
    UNANNOTATED = (
        "pod asks for a GPU without annotation headroom.gpu/vram",
        "Setting reject_unannotated rejects pods without a request of GPU memory.",
        "add the annotation to the pod, or headroom.gpu/default-vram to its namespace",
    )

    # Reasons of the node, on which Headroom reserves nothing.
    UNKNOWN_NODE = (
        "node is not known to Headroom",
        "The extender's watch does not show the node that kube-scheduler offers. Usually the node "
        "is a few seconds old.",
        "wait; if the reason persists, check sources of GET /v1/status for a watch that is behind",
    )
    NO_REPORT = (
        "no GPU report from the node",
        "No agent has reported the GPUs of the node, and its labels are not enough: the GPUs are "
        "shared, or labels are missing.",
        _AGENT,
    )
    LABELS_INCOMPLETE = (
        "no GPU report from the node, and its labels describe its GPUs incompletely",
        "With setting require_report: false, labels that describe a node's GPUs are enough. Here "
        "they are missing or contradict the node.",
        f"{_AGENT}; for unshared GPUs the labels of GPU feature discovery are enough",
    )
    STALE_REPORT = (
        "GPU report of the node is stale",
        "The agent has sent no heartbeat for longer than setting stale_after_s.",
        _AGENT,
    )
    NOT_INITIALISED = (
        "GPU ledger of the node is being set up",
        "Headroom is reserving memory for the pods that were already on the node.",
        "check whether an extender runs, because it sets up the ledger within seconds",
    )
    # headroom.gpu/reserve, device-choice or cordon.
    BAD_NODE_ANNOTATION = (
        "an annotation of Headroom on the node is not valid",
        "headroom.gpu/reserve, device-choice or cordon of the node cannot be parsed.",
        "correct the annotation, or remove it",
    )
    # The node's MIG layout is being changed, or the plugin does not offer its devices.
    MIG_CHANGING = (
        "MIG layout of the node is being changed",
        "The GPU Operator's MIG manager is changing the node's MIG devices.",
        "wait for the MIG manager; the log of its pod shows what it waits for",
    )
    MIG_FAILED = (
        "MIG layout of the node could not be changed as requested",
        "The MIG manager reports a failure in label nvidia.com/mig.config.state.",
        "check the log of the MIG manager's pod on the node; often a GPU was still in use",
    )
    MIG_INVALID = (
        "MIG layout of the node does not suit the MIG strategy of its device plugin",
        "With MIG strategy single, the device plugin offers only equal MIG devices.",
        "set MIG strategy mixed in the device plugin, or use the same MIG profiles on all GPUs of "
        "the node",
    )
    EVICTED_RECENTLY = (
        "node recently evicted a pod that was given a GPU without enough free memory",
        "The device plugin chose another GPU than predicted. The pause keeps the next pod from "
        "being evicted for the same cause.",
        "wait; the node accepts pods again by itself",
    )
    #: Rejects binds only.
    NODE_FILLED = (
        "another scheduler has just filled the CPU, the memory or the pods of the node",
        "Two schedulers chose the node at the same moment, and the other one has bound its pod.",
        "wait until kube-scheduler tries the pod again. If this happens often, keep the pods of "
        "other schedulers off GPU nodes with a taint. Example: nvidia.com/gpu=present:NoSchedule",
    )
    #: Rejects binds only.
    GROUP_DECLINED = (
        "another pod of the group cannot be bound",
        "The pods of a group are bound together. Another pod of the group lost its memory between "
        "kube-scheduler's choice and the bind.",
        "wait until kube-scheduler tries the group again",
    )
    # A foreign allocator assigns the node's GPUs. Neither sees the other's reservations.
    DRA_AND_PLUGIN = (
        "GPUs of the node are offered by a device plugin and by a DRA driver",
        "Device plugin and DRA allocate the same GPUs, and neither sees the allocations of the "
        "other. Pods that still run with a GPU from the plugin count as well.",
        "let only one of them offer GPUs of the node: remove the device plugin and wait until its "
        "pods have ended, or remove the DRA driver",
    )
    DRA_MANAGES = (
        "GPUs of the node are allocated by DRA, which ignores headroom.gpu/vram: convert the pod "
        "(headroom convert --to dra), or select other nodes",
        "kube-scheduler allocates the GPUs of the node by DRA, in whole devices. A pod can go "
        "there if it requests no amount of GPU memory (headroom.gpu/vram or the default of its "
        "namespace), no limit of SM activity, no start alone and no gate, and does not set "
        "NVIDIA_VISIBLE_DEVICES.",
        "convert the pod to claims: headroom convert --to dra -f pod.yaml; or select nodes with a "
        "device plugin by a nodeSelector; or remove the annotation, to get a whole GPU",
    )
    HAMI_MANAGES = (
        "GPUs of the node are managed by HAMi",
        _ALLOCATED_BY_OTHERS,
        _FOREIGN_ALLOCATOR,
    )
    KAI_MANAGES = (
        "GPUs of the node are managed by KAI",
        _ALLOCATED_BY_OTHERS,
        _FOREIGN_ALLOCATOR,
    )
    GPUSHARE_MANAGES = (
        "GPUs of the node are managed by gpushare",
        _ALLOCATED_BY_OTHERS,
        _FOREIGN_ALLOCATOR,
    )
    CHOOSES_DEVICES = (
        "pod sets NVIDIA_VISIBLE_DEVICES itself and the node may honor it",
        "The pod could use GPUs that are reserved for others.",
        "remove NVIDIA_VISIBLE_DEVICES from the pod, also from its envFrom",
    )
    NO_GATE = (
        "pod has no gate and GPUs of the node are for gated pods only",
        "The node has headroom.gpu/device-choice: gated, and the pod has no gate init container.",
        "create the pod again while the webhook runs and gate_image is set; or set "
        "headroom.gpu/gated: 'true' on the pod",
    )
    NO_SUCH_RESOURCE = (
        "node reports no GPU of the requested resource",
        "No GPU of the node has the extended resource, such as nvidia.com/gpu, that the pod "
        "requests.",
        "request a resource that the node offers: kubectl describe node",
    )

    # The candidate devices of the node.
    CONTRADICTORY_REPORT = (
        "report of a GPU that the pod could get contradicts itself",
        "The driver's figures cannot all be true, such as more memory used than there is.",
        "check the GPU (nvidia-smi on the node); cordon it: kubectl headroom cordon",
    )
    MEMORY_UNKNOWN = (
        "memory of a GPU that the pod could get is unknown: the driver does not report it",
        "The driver does not report the memory of a GPU that the device plugin could choose.",
        "check the driver (nvidia-smi on the node); for a GPU with unified memory (GB10, Jetson): "
        "kubectl annotate node NODE headroom.gpu/unified-memory=auto",
    )
    UNHEALTHY_DEVICE = (
        "a GPU that the pod could get is unhealthy",
        "The device plugin could choose a GPU that has failed.",
        "reset or replace the GPU; kubectl headroom top gpu --troubled shows its fault. On a "
        "steered node the other GPUs stay available",
    )
    COMPUTE_MODE = (
        "compute mode of a GPU that the pod could get allows no other process to use it",
        "Its compute mode is prohibited, so every process fails, or exclusive-process while time "
        "slicing shares the GPU, so every process after the first fails (devices are busy or "
        "unavailable).",
        "set the default mode on the node: nvidia-smi -i GPU -c DEFAULT; kubectl headroom why "
        "shows the command for the GPU",
    )
    CORDONED_DEVICE = (
        "a GPU that the pod could get is cordoned",
        "The device plugin could choose a GPU that headroom.gpu/cordon names.",
        "uncordon the GPU, or steer the node: headroom.gpu/device-choice: steered keeps its other "
        "GPUs available",
    )
    ABOVE_MPS_LIMIT = (
        "request is above the MPS limit of a GPU replica",
        "MPS limits each process to the GPU's memory / replicas.",
        "lower headroom.gpu/vram, set headroom.gpu/processes if the container has several, or use "
        "fewer replicas",
    )
    SM_ABOVE_LIMIT = (
        "SM activity of a GPU is unknown or above the limit",
        "A GPU that the pod could get is busier than the pod's headroom.gpu/max-sm.",
        "wait, raise headroom.gpu/max-sm, or remove it",
    )
    TOO_MANY_SHARED = (
        "more than one replica of a shared GPU in one container, which the device plugin rejects "
        "(failRequestsGreaterThanOne)",
        "The device plugin's setting failRequestsGreaterThanOne is true, which is the default with "
        "MPS, so each container with several replicas fails on the node. The reason also applies "
        "to a steered node whose agent is older than this version.",
        "for several GPUs, steer the node and set failRequestsGreaterThanOne: false in the device "
        "plugin's configuration; otherwise request 1 replica and the memory that it needs in "
        "headroom.gpu/vram",
    )
    OTHERS_ARRIVING = (
        "unconfirmed pods on the node must get their GPU first",
        "Pods are bound to the node, but no report shows their GPU yet, so each could get any GPU.",
        "wait a few seconds; if the reason persists, check why these pods do not start",
    )
    NO_REPLICA = (
        "no free GPU replica",
        "All replicas are taken, although memory may be free.",
        "wait for a pod to end, or configure more replicas in the device plugin: kubectl headroom "
        "doctor --plugin-config",
        True,
    )
    MEMORY_ON_ANY = (
        "insufficient GPU memory on any device",
        "No GPU of the node has enough free memory for the pod.",
        "lower headroom.gpu/vram, wait for a pod to end, or add a node; kubectl headroom why shows "
        "how much is missing",
        True,
    )
    TOO_FEW_DEVICES = (
        "too few GPUs with enough free memory at the same time",
        "A container requests several GPUs, and some GPUs of the node have enough free memory for "
        "it, but not as many as it requests.",
        "lower headroom.gpu/vram or the number of GPUs, wait for a pod to end, or add a node; "
        "kubectl headroom why shows how much is missing on each GPU",
        True,
    )
    MEMORY_ON_SOME = (
        "insufficient GPU memory on a device that the plugin could choose",
        "One GPU has enough free memory, but the device plugin could choose another GPU.",
        "steer the node, so that Headroom chooses the GPU: headroom.gpu/device-choice: steered",
        True,
    )
    #: Rejects only pods that start alone.
    OTHER_STARTING = (
        "another pod that starts alone is starting on a GPU that the pod could get",
        "Both pods have headroom.gpu/startup: alone.",
        "wait until the other pod is ready, or its headroom.gpu/startup-timeout has passed",
    )
    HELD = (
        "GPU memory is held for another pod, which goes first",
        "The pod would fit on the node without another pod that goes first and is not bound yet. "
        "kube-scheduler is about to bind that pod, or other pods have left the node for it.",
        "wait until the other pod is bound, or the hold ends; kubectl headroom why names the pod "
        "and the time",
        True,
    )

    def __init__(self, sentence: str, meaning: str, remedy: str, evictable: bool = False) -> None:
        self.code = self.name.lower()
        self.sentence = sentence
        self.meaning = meaning
        self.remedy = remedy
        self.evictable = evictable
