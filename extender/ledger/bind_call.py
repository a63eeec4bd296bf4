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
    #: The pod as the filter call sent it; None if this replica did not serve that call.
    pod: Pod | None
    #: The GPUNode as the watch delivered it; None if the watch has not delivered it.
    gpunode: GPUNode | None
    #: Monotonic time in seconds at which kube-scheduler's call times out. After that, its
    #: assumptions about the node (CPU, ports, volumes) no longer hold.
    until_s: float = math.inf
    #: Waits for the other pods of the group after the pod's memory was reserved. Returns whether to
    #: bind the pod.
    may_bind: Callable[[], Awaitable[bool]] | None = None


@dataclass(frozen=True, slots=True)
class Bound:
    """The pod is bound to the requested node, by this call or before it."""

    #: The pod's resourceVersion for which this call decided; empty if it did not decide.
    version: str = field(default="", compare=False)
    #: In mode observe, the reason for which mode enforce would have declined the bind.
    despite: Reason | None = None


@dataclass(frozen=True, slots=True)
class Declined:
    """The pod does not fit on the node, or does not fit any more, so kube-scheduler tries it
    again."""

    reason: Reason
    #: The pod's resourceVersion for which this call decided.
    version: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """The bind failed. ``message`` states the reason, for the pod's condition."""

    message: str
    #: As in ``Bound``.
    version: str = field(default="", compare=False)


Outcome = Bound | Declined | Failed
