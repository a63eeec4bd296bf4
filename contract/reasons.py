"""The closed list of reasons why a pod is unschedulable on a node.

A sentence does not change while its cause lasts, and has no number, node name or percent sign,
because kube-scheduler counts equal sentences ("3 insufficient GPU memory on any device") and
formats them. If the message of a pod keeps changing, kube-scheduler retries the pod a hundred times
a second. The debug API reports the numbers of the same verdict.
"""

from enum import Enum


class Reason(Enum):
    """One cause. ``code`` is the name in lower case, for programs; ``sentence`` is for people.

    ``evictable``: whether evicting pods from the node could make the pod fit.
    """

    # The pod itself: it fits on no node.
    BAD_VRAM = "annotation headroom.gpu/vram is not valid (example: 8Gi)"
    BAD_POLICY = "annotation headroom.gpu/policy is not valid (example: pack)"
    BAD_MAX_SM = "annotation headroom.gpu/max-sm is not valid"
    BAD_PROCESSES = "annotation headroom.gpu/processes is not valid (example: 1)"
    BAD_ON_OVERUSE = "annotation headroom.gpu/on-overuse is not valid (example: evict)"
    BAD_STARTUP = "annotation headroom.gpu/startup is not valid (example: alone)"
    BAD_STARTUP_TIMEOUT = "annotation headroom.gpu/startup-timeout is not valid (example: 10m)"
    BAD_DEFAULT_VRAM = (
        "annotation headroom.gpu/default-vram of the namespace is not valid (example: 4Gi)"
    )
    BAD_POD = "number of GPUs that the pod asks for cannot be read"
    POD_TOO_LARGE = "pod has more containers, annotations or node constraints than Headroom accepts"
    UNANNOTATED = "pod asks for a GPU without annotation headroom.gpu/vram"

    # The node: Headroom reserves nothing on it.
    UNKNOWN_NODE = "node is not known to Headroom"
    NO_REPORT = "no GPU report from the node"
    LABELS_INCOMPLETE = "no GPU report from the node, and its labels describe its GPUs incompletely"
    STALE_REPORT = "GPU report of the node is stale"
    NOT_INITIALISED = "GPU ledger of the node is being set up"
    # headroom.gpu/reserve, device-choice or cordon.
    BAD_NODE_ANNOTATION = "an annotation of Headroom on the node is not valid"
    CANNOT_PIN = "node is to be pinned, but is not known to obey NVIDIA_VISIBLE_DEVICES of its pods"
    # The node's MIG layout is being changed, or the plugin does not offer its devices.
    MIG_CHANGING = "MIG layout of the node is being changed"
    MIG_FAILED = "MIG layout of the node could not be changed as asked"
    MIG_INVALID = "MIG layout of the node does not suit the MIG strategy of its device plugin"
    EVICTED_RECENTLY = "node recently evicted a pod that was given a GPU without enough free memory"
    # A foreign allocator assigns the node's GPUs. Neither sees the other's reservations.
    DRA_MANAGES = "GPUs of the node are managed by a DRA driver"
    HAMI_MANAGES = "GPUs of the node are managed by HAMi"
    KAI_MANAGES = "GPUs of the node are managed by KAI"
    GPUSHARE_MANAGES = "GPUs of the node are managed by gpushare"
    CHOOSES_DEVICES = "pod sets NVIDIA_VISIBLE_DEVICES itself and the node may obey it"
    NOT_PINNED = (
        "pod lets NVIDIA_VISIBLE_DEVICES follow its placement and GPUs of the node are not pinned"
    )
    NO_GATE = "pod has no gate and GPUs of the node are for gated pods only"
    NO_SUCH_RESOURCE = "node reports no GPU of the requested resource"

    # The candidate devices of the node.
    CONTRADICTORY_REPORT = "report of a GPU that the pod could get contradicts itself"
    MEMORY_UNKNOWN = (
        "memory of a GPU that the pod could get is unknown: the driver does not report it"
    )
    UNHEALTHY_DEVICE = "a GPU that the pod could get is unhealthy"
    CORDONED_DEVICE = "a GPU that the pod could get is cordoned"
    ABOVE_MPS_LIMIT = "request is above the MPS limit of a GPU replica"
    SM_ABOVE_LIMIT = "SM activity of a GPU is unknown or above the limit"
    TOO_MANY_SHARED = "more than one replica of a shared GPU in one container"
    OTHERS_ARRIVING = "unconfirmed pods on the node must get their GPU first"
    NO_REPLICA = ("no free GPU replica", True)
    MEMORY_ON_ANY = ("insufficient GPU memory on any device", True)
    MEMORY_ON_SOME = ("insufficient GPU memory on a device that the plugin could choose", True)
    #: Rejects only pods that start alone.
    OTHER_STARTING = "another pod that starts alone is starting on a GPU that the pod could get"

    def __init__(self, sentence: str, evictable: bool = False) -> None:
        self.code = self.name.lower()
        self.sentence = sentence
        self.evictable = evictable
