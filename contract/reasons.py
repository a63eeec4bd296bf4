"""The closed list of reasons why a pod is unschedulable on a node.

A sentence stays equal while its cause lasts, and has no number, node name or percent sign.
kube-scheduler counts equal sentences ("3 insufficient GPU memory on any device") and formats them.
It retries a pod whose message keeps changing a hundred times a second. The debug API reports the
numbers of the same verdict.
"""

from enum import Enum


class Reason(Enum):
    """One cause: ``code`` for programs, ``sentence`` for kube-scheduler.

    ``evictable`` is whether evicting pods from the node could make the pod fit.
    """

    # The pod itself: it fits on no node.
    BAD_VRAM = ("bad_vram", "annotation headroom.gpu/vram is not valid (example: 8Gi)", False)
    BAD_POLICY = (
        "bad_policy",
        "annotation headroom.gpu/policy is not valid (example: pack)",
        False,
    )
    BAD_MAX_SM = ("bad_max_sm", "annotation headroom.gpu/max-sm is not valid", False)
    BAD_PROCESSES = (
        "bad_processes",
        "annotation headroom.gpu/processes is not valid (example: 1)",
        False,
    )
    BAD_DEFAULT_VRAM = (
        "bad_default_vram",
        "annotation headroom.gpu/default-vram of the namespace is not valid (example: 4Gi)",
        False,
    )
    BAD_POD = ("bad_pod", "number of GPUs that the pod asks for cannot be read", False)
    POD_TOO_LARGE = (
        "pod_too_large",
        "pod has more containers, annotations or node constraints than Headroom accepts",
        False,
    )
    UNANNOTATED = ("unannotated", "pod asks for a GPU without annotation headroom.gpu/vram", False)

    # The node: Headroom reserves nothing on it.
    UNKNOWN_NODE = ("unknown_node", "node is not known to Headroom", False)
    NO_REPORT = ("no_report", "no GPU report from the node", False)
    LABELS_SAY_TOO_LITTLE = (
        "labels_say_too_little",
        "no GPU report from the node, and its labels describe its GPUs incompletely",
        False,
    )
    STALE_REPORT = ("stale_report", "GPU report of the node is stale", False)
    NOT_INITIALISED = ("not_initialised", "GPU ledger of the node is being set up", False)
    BAD_NODE_ANNOTATION = (
        "bad_node_annotation",
        "annotation headroom.gpu/reserve or headroom.gpu/device-choice of the node is not valid",
        False,
    )
    CANNOT_PIN = (
        "cannot_pin",
        "node is to be pinned, but is not known to obey NVIDIA_VISIBLE_DEVICES of its pods",
        False,
    )
    # The node's MIG layout is being changed, or the plugin does not offer its devices.
    MIG_CHANGING = ("mig_changing", "MIG layout of the node is being changed", False)
    MIG_FAILED = ("mig_failed", "MIG layout of the node could not be changed as asked", False)
    MIG_INVALID = (
        "mig_invalid",
        "MIG layout of the node does not suit the MIG strategy of its device plugin",
        False,
    )
    EVICTED_LATELY = (
        "evicted_lately",
        "node recently evicted a pod that was given a GPU without enough free memory",
        False,
    )
    # A foreign allocator assigns the node's GPUs. Neither sees the other's reservations.
    DRA_MANAGES = ("dra_manages", "GPUs of the node are managed by a DRA driver", False)
    HAMI_MANAGES = ("hami_manages", "GPUs of the node are managed by HAMi", False)
    KAI_MANAGES = ("kai_manages", "GPUs of the node are managed by KAI", False)
    GPUSHARE_MANAGES = ("gpushare_manages", "GPUs of the node are managed by gpushare", False)
    CHOOSES_DEVICES = (
        "chooses_devices",
        "pod sets NVIDIA_VISIBLE_DEVICES itself and the node may obey it",
        False,
    )
    NOT_PINNED = (
        "not_pinned",
        "pod lets NVIDIA_VISIBLE_DEVICES follow its placement and GPUs of the node are not pinned",
        False,
    )
    NO_GATE = (
        "no_gate",
        "pod has no gate and GPUs of the node are for gated pods only",
        False,
    )
    NO_SUCH_RESOURCE = ("no_such_resource", "node reports no GPU of the requested resource", False)

    # The candidate devices of the node.
    CONTRADICTORY_REPORT = (
        "contradictory_report",
        "report of a GPU that the pod could get contradicts itself",
        False,
    )
    MEMORY_UNKNOWN = (
        "memory_unknown",
        "memory of a GPU that the pod could get is unknown: the driver does not report it",
        False,
    )
    UNHEALTHY_DEVICE = ("unhealthy_device", "a GPU that the pod could get is unhealthy", False)
    ABOVE_MPS_LIMIT = ("above_mps_limit", "request is above the MPS limit of a GPU replica", False)
    SM_ABOVE_LIMIT = ("sm_above_limit", "SM activity of a GPU is unknown or above the limit", False)
    TOO_MANY_SHARED = (
        "too_many_shared",
        "more than one replica of a shared GPU in one container",
        False,
    )
    OTHERS_ARRIVING = (
        "others_arriving",
        "unconfirmed pods on the node must get their GPU first",
        False,
    )
    NO_REPLICA = ("no_replica", "no free GPU replica", True)
    MEMORY_ON_ANY = ("memory_on_any", "insufficient GPU memory on any device", True)
    MEMORY_ON_SOME = (
        "memory_on_some",
        "insufficient GPU memory on a device that the plugin could choose",
        True,
    )

    def __init__(self, code: str, sentence: str, evictable: bool) -> None:
        self.code = code
        self.sentence = sentence
        self.evictable = evictable
