"""The closed list of reasons why a pod is not placed on a node.

A sentence never changes while its cause does not, holds no number and no node name, and has no
percent sign: kube-scheduler counts equal sentences ("3 insufficient GPU memory on any device"),
formats them, and retries a pod whose message keeps changing a hundred times a second.
Numbers are told by the debug API, from the same verdict.
"""

from enum import Enum


class Reason(Enum):
    """One cause: ``code`` for programs, ``sentence`` for kube-scheduler, ``evictable`` for us.

    ``evictable`` says whether evicting pods from the node could cure it.
    """

    # The pod: no node can help.
    BAD_VRAM = ("bad_vram", "annotation headroom.gpu/vram is not valid, right is 8Gi", False)
    BAD_POLICY = ("bad_policy", "annotation headroom.gpu/policy is not valid, right is pack", False)
    BAD_MAX_SM = ("bad_max_sm", "annotation headroom.gpu/max-sm is not valid", False)
    BAD_PROCESSES = (
        "bad_processes",
        "annotation headroom.gpu/processes is not valid, right is 1",
        False,
    )
    BAD_DEFAULT_VRAM = (
        "bad_default_vram",
        "annotation headroom.gpu/default-vram of the namespace is not valid, right is 4Gi",
        False,
    )
    BAD_POD = ("bad_pod", "number of GPUs that the pod asks for cannot be read", False)
    POD_TOO_LARGE = (
        "pod_too_large",
        "pod has more containers, annotations or node constraints than Headroom accepts",
        False,
    )
    UNANNOTATED = ("unannotated", "pod asks for a GPU without annotation headroom.gpu/vram", False)

    # The node: nothing on it can be promised.
    UNKNOWN_NODE = ("unknown_node", "node is not known to Headroom", False)
    NO_REPORT = ("no_report", "no GPU report from the node", False)
    LABELS_SAY_TOO_LITTLE = (
        "labels_say_too_little",
        "no GPU report from the node, and its labels do not say enough of its GPUs",
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
    # Its GPUs are being cut up anew, or into what the plugin does not offer.
    MIG_CHANGING = ("mig_changing", "MIG layout of the node is being changed", False)
    MIG_FAILED = ("mig_failed", "MIG layout of the node could not be changed as asked", False)
    MIG_INVALID = (
        "mig_invalid",
        "MIG layout of the node does not suit the MIG strategy of its device plugin",
        False,
    )
    EVICTED_LATELY = (
        "evicted_lately",
        "node had to send a pod away a moment ago, whose GPU had no room for it",
        False,
    )
    # Somebody else gives its GPUs out, and neither knows what the other promised.
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

    # A device of the node that the pod could end on.
    CONTRADICTORY_REPORT = (
        "contradictory_report",
        "report of a GPU that the pod could get contradicts itself",
        False,
    )
    MEMORY_UNKNOWN = (
        "memory_unknown",
        "memory of a GPU that the pod could get is not known, its driver does not tell",
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
        "pods on their way to the node are promised another GPU",
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
