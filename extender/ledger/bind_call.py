"""One bind call of kube-scheduler, and its possible outcomes."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason


@dataclass(frozen=True, slots=True)
class BindRequest:
    """A bind call of kube-scheduler, with the objects that this replica has cached for it."""

    namespace: str
    name: str
    uid: str
    node: str
    #: The pod that was sent in the filter call. None if another replica served the filter call.
    pod: Pod | None
    #: The GPUNode that the watch delivered, or None if the watch has not delivered it yet.
    gpunode: GPUNode | None
    #: Monotonic time in seconds at which kube-scheduler's call times out. After that, its
    #: assumptions about the node (CPU, ports, volumes) no longer hold.
    until_s: float = math.inf
    #: A function that waits for the other pods of the group after the pod's memory was reserved,
    #: and returns whether to bind the pod.
    may_bind: Callable[[], Awaitable[bool]] | None = None


@dataclass(frozen=True, slots=True)
class Bound:
    """The pod is bound to the requested node, by this call or before it."""

    #: The resourceVersion of the pod that this call decided on. Empty if the call made no decision.
    version: str = field(default="", compare=False)
    #: In mode observe, the reason for which mode enforce would have declined the bind.
    despite: Reason | None = None


@dataclass(frozen=True, slots=True)
class Declined:
    """The pod does not fit on the node, or no longer fits. kube-scheduler tries it again."""

    reason: Reason
    #: The resourceVersion of the pod for which this call decided.
    version: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """The bind failed. ``message`` states the reason, for the pod's condition."""

    message: str
    #: The same as ``Bound.version``.
    version: str = field(default="", compare=False)


Outcome = Bound | Declined | Failed
