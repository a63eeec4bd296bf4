"""Whether the MIG layout of a node is one that can be relied on, from what its labels say of it.

NVIDIA's MIG manager takes the devices apart while pods may still be bound: a device in the last
report can be gone before the next pod is admitted. It says ``success`` when it is done. GPU feature
discovery calls a layout invalid that strategy ``single`` cannot offer: profiles that differ, whole
GPUs beside MIG devices, a GPU with none.
"""

from contract.kube import Node
from contract.reasons import Reason

STATE = "nvidia.com/mig.config.state"
PRODUCT = "nvidia.com/gpu.product"
_DONE = "success"
_FAILED = "failed"
_INVALID = "-MIG-INVALID"


def mig_obstacle(node: Node) -> tuple[Reason, str] | None:
    """Why nothing can be placed on the node, and what says so; None where MIG is no obstacle."""
    labels = node.metadata.labels or {}
    state = labels.get(STATE, _DONE)
    if state != _DONE:
        reason = Reason.MIG_FAILED if state == _FAILED else Reason.MIG_CHANGING
        return reason, f"label {STATE} is {state!r}"
    product = labels.get(PRODUCT, "")
    if product.endswith(_INVALID):
        return Reason.MIG_INVALID, f"label {PRODUCT} is {product!r}"
    return None
