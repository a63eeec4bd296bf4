"""The annotations, labels, resources and the taint that Headroom defines in Kubernetes objects.

Each definition describes the name for users, and `make docs` writes docs/reference/annotations.md
from the descriptions. ``contract.annotations`` parses the values, and exports the names too.
"""

from dataclasses import dataclass

PREFIX = "headroom.gpu/"

#: Value of ``SCHEDULER`` with which pods keep their own ``spec.schedulerName``.
NO_SCHEDULER = "none"
YOU = "you"


@dataclass(frozen=True, slots=True)
class Key:
    """The description of one name, in Markdown."""

    name: str
    #: Kinds of the objects that have the key, such as "Pod, Namespace".
    on: str
    #: ``YOU``, or the component of Headroom that writes the key.
    writer: str
    meaning: str
    #: The valid values, or the format.
    values: str
    #: A valid value.
    example: str
    #: The effect of a missing key. Empty if Headroom writes the key.
    default: str = ""
    #: The components that read the key.
    reader: str = "extender"
    #: One of annotation, label, resource, finalizer and taint.
    kind: str = "annotation"


_described: list[Key] = []


def _key(name: str, **about: str) -> str:
    """Record the description of a name, and return the whole name."""
    _described.append(Key(PREFIX + name, **about))
    return PREFIX + name


VRAM = _key(
    "vram",
    on="Pod",
    writer=YOU,
    values="`8Gi` or `8000Mi`: an amount; `25%`: a share of the GPU's allocatable memory; "
    "`main=8Gi,cache=2Gi`: amounts by container; `auto`, `auto,min=2Gi,max=20Gi,default=8Gi`: the "
    "webhook writes the recommendation",
    example="8Gi",
    default="`headroom.gpu/default-vram` of the namespace; without it the memory of one replica "
    "(allocatable memory / replicas), or with setting `reject_unannotated` the pod is rejected",
    reader="webhook, extender",
    meaning="GPU memory that each GPU container needs on each of its GPUs.",
)
VRAM_LIMIT = _key(
    "vram-limit",
    on="Pod",
    writer=YOU,
    values="`20Gi`: an amount; `50%`: a share; `main=20Gi,cache=2Gi`: amounts by container; `none`",
    example="20Gi",
    default="`headroom.gpu/default-vram-limit` or `headroom.gpu/max-vram-limit` of the namespace; "
    "without them no limit",
    reader="webhook, extender",
    meaning="Maximum GPU memory that each GPU container may use on each of its GPUs. A pod that "
    "uses more is evicted. See [bursts.md](../how-to/bursts.md).",
)
POLICY = _key(
    "policy",
    on="Pod",
    writer=YOU,
    values="`pack`, `spread` or `fragmentation`",
    example="spread",
    default="setting `policy`",
    meaning="How nodes are scored for the pod: [scores.md](../concepts/scores.md).",
)
MAX_SM = _key(
    "max-sm",
    on="Pod",
    writer=YOU,
    values="a share above 0% and up to 100%",
    example="70%",
    default="no limit",
    meaning="Maximum SM activity of the pod's GPU. The pod fits on no GPU with this or a higher SM "
    "activity, or with unknown SM activity.",
)
PROCESSES = _key(
    "processes",
    on="Pod",
    writer=YOU,
    values="1 to 1024",
    example="2",
    default="1",
    meaning="Number of processes in each container that use the GPU. MPS limits the memory of each "
    "process, so the pod's memory must fit into this number of limits.",
)
ON_OVERUSE = _key(
    "on-overuse",
    on="Pod",
    writer=YOU,
    values="`report` or `evict`",
    example="evict",
    default="setting `on_overuse`",
    meaning="Reaction if the pod uses more memory than it reserved: only report it, or also evict "
    "the pod while other pods lack memory that they reserved. See "
    "[overuse.md](../how-to/overuse.md).",
)
STARTUP = _key(
    "startup",
    on="Pod",
    writer=YOU,
    values="`alone`",
    example="alone",
    default="starts together with other pods",
    meaning="Until the pod has started, no other pod with this annotation starts on its GPU. See "
    "[starting-alone.md](../how-to/starting-alone.md).",
)
STARTUP_TIMEOUT = _key(
    "startup-timeout",
    on="Pod",
    writer=YOU,
    values="a duration from 1s to 24h",
    example="20m",
    default="`10m`",
    meaning="Maximum time for which a pod with `headroom.gpu/startup: alone` keeps other pods "
    "waiting. It is at most setting `max_startup_timeout_s`.",
)
GATED = _key(
    "gated",
    on="Pod, Namespace",
    writer=YOU,
    values="`true` or `false`",
    example="true",
    default="gated only if a node with `headroom.gpu/device-choice: gated` is eligible",
    reader="webhook",
    meaning="Whether an init container holds the pod until its GPU has enough free memory. The "
    "annotation of the pod overrides the annotation of its namespace.",
)
SHARE = _key(
    "share",
    on="Pod, Namespace",
    writer=YOU,
    values="`none`; `env`: variables with the container's share; `limit`: also the variables by "
    "which the driver or MPS enforces the share, if every eligible node can",
    example="env",
    default="`none`",
    reader="webhook",
    meaning="Whether GPU containers get their share of the GPU's memory in environment variables "
    "(see [frameworks.md](../how-to/frameworks.md)). The annotation of the pod overrides the "
    "annotation of its namespace.",
)
DEFAULT_VRAM = _key(
    "default-vram",
    on="Namespace",
    writer=YOU,
    values="the same as `headroom.gpu/vram`, except `auto`",
    example="4Gi",
    default="none",
    reader="webhook, extender",
    meaning="`headroom.gpu/vram` for GPU pods of the namespace that do not set it.",
)
DEFAULT_VRAM_LIMIT = _key(
    "default-vram-limit",
    on="Namespace",
    writer=YOU,
    values="the same as `headroom.gpu/vram-limit`",
    example="20Gi",
    default="none",
    reader="webhook",
    meaning="`headroom.gpu/vram-limit` for GPU pods of the namespace that request an amount and "
    "set no limit. A pod that requests more gets its request as its limit.",
)
MAX_VRAM_LIMIT = _key(
    "max-vram-limit",
    on="Namespace",
    writer=YOU,
    values="an amount or a share",
    example="40Gi",
    default="none",
    reader="webhook",
    meaning="Maximum `headroom.gpu/vram` and `headroom.gpu/vram-limit` of a container in the "
    "namespace. It is also the limit of pods that state none. Pods without an amount are rejected.",
)
SCHEDULER = _key(
    "scheduler",
    kind="label",
    on="Namespace",
    writer=YOU,
    values="a scheduler's name; `none`: pods keep their own scheduler and are not changed",
    example=NO_SCHEDULER,
    default="setting `scheduler_name`",
    reader="webhook, admission policies",
    meaning="`spec.schedulerName` that GPU pods without a scheduler get in the namespace.",
)
DEVICE_CHOICE = _key(
    "device-choice",
    on="Node",
    writer=YOU,
    values="`predicted`, `gated` or `steered`",
    example="steered",
    default="`predicted`, or the agent's flag `--device-choice`",
    reader="extender, agent",
    meaning="How the GPU of a pod is chosen on the node: "
    "[device choice](../concepts/device-choice.md).",
)
RESERVE = _key(
    "reserve",
    on="Node",
    writer=YOU,
    values="an amount; 0 is allowed",
    example="512Mi",
    default="0",
    meaning="Memory of each GPU of the node that is never reserved for pods.",
)
CORDON = _key(
    "cordon",
    on="Node",
    writer=f"{YOU}, or `kubectl headroom cordon`",
    values="UUIDs of GPUs, separated by commas; at most 128",
    example="GPU-5fd9a1c4-3c3e-4f5a-9a57-0f4e7d1b2c3d",
    default="none",
    meaning="GPUs that take no new pods. Pods on them stay.",
)
MAINTENANCE = _key(
    "maintenance",
    on="Node",
    writer=YOU,
    values="`true` or `false`",
    example="true",
    default="`false`",
    reader="agent",
    meaning="Whether the agent releases the driver, so that the driver or the GPUs can be "
    "replaced. The node takes no new pods while this is set.",
)
UNIFIED_MEMORY = _key(
    "unified-memory",
    on="Node",
    writer=YOU,
    values="an amount, or `auto`, which leaves a tenth to the host, and at least 2 GiB",
    example="96Gi",
    default="the agent's flag `--unified-memory`",
    reader="agent",
    meaning="Memory of the host that a GPU without memory of its own (GB10, Jetson) may use. It "
    "takes effect within a minute.",
)
VRAM_FROM = _key(
    "vram-from",
    on="Pod",
    writer="webhook",
    values="`namespace NAME`, `VRAMProfile NAME`, or `default= of the request`",
    example="namespace team-a",
    reader="webhook",
    meaning="Source of the `headroom.gpu/vram` that the webhook wrote.",
)
VRAM_REQUESTED = _key(
    "vram-requested",
    on="Pod",
    writer="webhook",
    values="`auto` with its options",
    example="auto,min=2Gi",
    reader="people",
    meaning="The original `headroom.gpu/vram`, which the webhook replaced by an amount.",
)
PLACEMENT = _key(
    "placement",
    on="Pod",
    writer="extender",
    values="JSON",
    example='{"node":"gpu-a","decision":"0b5c.481", ...}',
    reader="extender, console, agent's gate",
    meaning="Where and why the pod was placed, with the id of the decision. Written with the "
    "Binding.",
)
DEVICES = _key(
    "devices.",
    on="Pod",
    writer="extender",
    values="UUIDs, separated by commas",
    example="GPU-5fd9a1c4-3c3e-4f5a-9a57-0f4e7d1b2c3d",
    reader="the pod, by the downward API",
    meaning="GPUs of the container with this index, if they are known at the bind, as on steered "
    "nodes. Written with the Binding.",
)
BYTES = _key(
    "bytes.",
    on="Pod",
    writer="extender",
    values="bytes",
    example="8589934592",
    reader="the pod, by `HEADROOM_VRAM_BYTES`",
    meaning="Memory that the container with this index may use on each of its GPUs; the smallest "
    "value if the possible GPUs differ. Written with the Binding.",
)
FRACTION = _key(
    "fraction.",
    on="Pod",
    writer="extender",
    values="0.0000 to 1.0000, rounded down",
    example="0.3333",
    reader="the pod, by `HEADROOM_VRAM_FRACTION`",
    meaning="`headroom.gpu/bytes.INDEX` as a fraction of the GPU's memory. Written with the "
    "Binding.",
)
LIMIT_BYTES = _key(
    "limit-bytes.",
    on="Pod",
    writer="extender",
    values="bytes",
    example="21474836480",
    reader="the pod, by `HEADROOM_VRAM_LIMIT_BYTES`",
    meaning="Limit of the container with this index on each of its GPUs; the smallest value if the "
    "possible GPUs differ. Written with the Binding if the pod has a limit.",
)
LIMIT_FRACTION = _key(
    "limit-fraction.",
    on="Pod",
    writer="extender",
    values="0.0000 to 1.0000, rounded down",
    example="0.8333",
    reader="the pod, by `HEADROOM_VRAM_LIMIT_FRACTION`",
    meaning="`headroom.gpu/limit-bytes.INDEX` as a fraction of the GPU's memory. Written with the "
    "Binding if the pod has a limit.",
)
RETRY = _key(
    "retry",
    on="Pod",
    writer="extender",
    values="an id",
    example="extender-7c9d-12",
    reader="kube-scheduler, which retries a changed pod",
    meaning="Written on a rejected pod that fits now, so that kube-scheduler requeues it.",
)
PREEMPTING = _key(
    "preempting",
    on="Pod",
    writer="extender",
    values="JSON: node, victims, start time",
    example='{"id":"7c9d","node":"gpu-a", ...}',
    meaning="Pods of lower priority are evicted from the node for this pod.",
)
TOUCHED = _key(
    "touched",
    on="Pod",
    writer="extender",
    values="an id",
    example="extender-7c9d-3",
    reader="API server, which rejects a Binding of an older version of the pod",
    meaning="Written on an unbound pod when the ledger of a node is set up, so that Bindings in "
    "flight fail.",
)
DECISION = _key(
    "decision",
    on="Event",
    writer="extender",
    values="`UID.RESOURCEVERSION` of the pod",
    example="0b5c.481",
    reader="console",
    meaning="The decision that the Event is about.",
)
OBSERVED_AT = _key(
    "observed-at",
    on="Lease",
    writer="agent",
    values="JSON",
    example='{"sampledAt":"2026-11-22T03:11:03Z", ...}',
    reader="extender, console",
    meaning="The agent's heartbeat: when the newest sample was taken, and which report it "
    "confirms.",
)
RULE_NODE = _key(
    "node",
    on="DeviceTaintRule",
    writer="device-taints",
    values="a node's name",
    example="gpu-a",
    reader="device-taints",
    meaning="Node of the tainted DRA device.",
)
RULE_DEVICE = _key(
    "device",
    on="DeviceTaintRule",
    writer="device-taints",
    values="a UUID",
    example="GPU-5fd9a1c4-3c3e-4f5a-9a57-0f4e7d1b2c3d",
    reader="people",
    meaning="UUID of the tainted DRA device.",
)
POOL = _key(
    "pool",
    kind="label",
    on="DaemonSet and Pod of an agent",
    writer="Helm chart",
    values="a name of `agent.pools`",
    example="a100",
    reader="the DaemonSet's selector",
    meaning="Pool of nodes whose agents have settings of their own: "
    "[helm-values.md](helm-values.md).",
)
#: The resource that nodes offer if ``mirror_vram`` is set. It has the same name as the annotation
#: ``VRAM``.
MIRROR = _key(
    "vram",
    kind="resource",
    on="Node, container",
    writer="extender (Node), webhook (container)",
    values="MiB",
    example="8192",
    reader="kube-scheduler, ResourceQuotas, autoscalers",
    meaning="GPU memory as an extended resource, with setting `mirror_vram`: "
    "[autoscaling.md](../how-to/autoscaling.md#the-in-tree-mirror).",
)
#: The resource that quotas count if ``count_vram`` is set.
COUNTED_VRAM = _key(
    "vram-bytes",
    kind="resource",
    on="container",
    writer="webhook",
    values="bytes, as a quantity",
    example="8Gi",
    reader="ResourceQuotas, Kueue",
    meaning="GPU memory of the container on all its GPUs, with setting `count_vram`. No node "
    "offers it, so kube-scheduler must ignore it: "
    "[quotas.md](../how-to/quotas.md).",
)
FINALIZER = _key(
    "ledger",
    kind="finalizer",
    on="GPUNode",
    writer="extender",
    values="-",
    example="headroom.gpu/ledger",
    meaning="Keeps a GPUNode and its reservations until its node is gone.",
)
TAINT_KEY = _key(
    "use-beyond-claims",
    kind="taint",
    on="DRA device",
    writer="device-taints",
    values="`true`, effect `NoSchedule`",
    example="true",
    reader="kube-scheduler",
    meaning="Pods use more memory of the device than their claims hold: "
    "[dra.md](../how-to/dra.md).",
)

#: All names, in the order of their definitions.
KEYS = tuple(_described)
