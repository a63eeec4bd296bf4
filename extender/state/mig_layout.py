"""Checks by a node's labels whether its MIG layout is stable and valid.

NVIDIA's MIG manager reconfigures devices while pods may still be bound: a device in the last report
can be gone before the next pod is admitted. It sets the label to ``success`` when it is done. GPU
feature discovery marks a layout as invalid if strategy ``single`` cannot offer it: different
profiles, whole GPUs next to MIG devices, or a GPU without MIG devices.
"""

from contract.kube import Node
from contract.reasons import Reason

STATE = "nvidia.com/mig.config.state"
PRODUCT = "nvidia.com/gpu.product"
_DONE = "success"
_FAILED = "failed"
_INVALID = "-MIG-INVALID"


def mig_obstacle(node: Node) -> tuple[Reason, str] | None:
    """Return why MIG makes the node unusable, and the label that shows it; None if it does not."""
    labels = node.metadata.labels or {}
    state = labels.get(STATE, _DONE)
    if state != _DONE:
        reason = Reason.MIG_FAILED if state == _FAILED else Reason.MIG_CHANGING
        return reason, f"label {STATE} is {state!r}"
    product = labels.get(PRODUCT, "")
    if product.endswith(_INVALID):
        return Reason.MIG_INVALID, f"label {PRODUCT} is {product!r}"
    return None
