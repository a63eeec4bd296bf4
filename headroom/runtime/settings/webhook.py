"""The settings of the webhook, as its decisions read them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """The settings of the webhook."""

    #: Name of the scheduler that calls Headroom. GPU pods that name no scheduler get this name.
    scheduler: str = "headroom"
    #: Image of the gate. Empty if pods get no gate.
    gate_image: str = ""
    #: Whether pods request the extended resource of the in-tree mirror.
    mirror: bool = False
    #: Whether the mode is observe, in which Headroom rejects nothing. In this mode, pods must not
    #: depend on annotations that Headroom writes when it places a pod, because a pod that does not
    #: fit runs without them.
    observes: bool = False
    #: Whether pods request the extended resource that ResourceQuotas count.
    counts: bool = False
