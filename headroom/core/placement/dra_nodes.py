"""Decides which pods fit on nodes on which kube-scheduler allocates GPUs by DRA.

On such a node DRA serves extended resources such as ``nvidia.com/gpu``. kube-scheduler chooses the
device and gives a pod whole devices, whatever amount of memory the pod requests. So only pods
without a condition that Headroom would have to check may use the node. kube-scheduler offers such a
node in a filter call only after it has found free devices on it.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headroom.contract.reasons import Reason
from headroom.core.placement.request import VramRequest
from headroom.core.placement.snapshot import CODE_OF, Mask, NodeTerms, Rows, Snapshot
from headroom.core.placement.visible_devices import Visible

_DRA = CODE_OF[Reason.DRA_MANAGES]
_NO_RESOURCE = CODE_OF[Reason.NO_SUCH_RESOURCE]


def suits_dra(request: VramRequest) -> bool:
    """Return whether the pod sets no condition for its GPUs that only Headroom checks.

    Such conditions are an amount of memory (even if it is only the default of the namespace), a
    limit on SM activity, a start alone, and a gate. A pod that sets NVIDIA_VISIBLE_DEVICES is not
    suitable either, because it could use devices that DRA gives to other pods.
    """
    return (
        all(ask.source == "replica" for ask in request.containers)
        and request.max_sm_ppm is None
        and not request.starts_alone
        and not request.gated
        and request.visible is Visible.BY_PLUGIN
    )


def by_headroom(request: VramRequest) -> VramRequest:
    """Return the request without nodes on which DRA serves it.

    Answers that count or move pods need this, because it is unknown how many pods kube-scheduler
    could place on such nodes.
    """
    return replace(request, may_use_dra=False) if request.may_use_dra else request


def is_served(request: VramRequest, node: NodeTerms) -> bool:
    """Return whether DRA serves all resources that the pod requests on the node."""
    return all(ask.resource in node.by_dra for ask in request.asks)


def served(request: VramRequest, snap: Snapshot, rows: Rows, codes: NDArray[np.int8]) -> Mask:
    """Return the mask (n,) of the rows on which kube-scheduler allocates the pod's GPUs by DRA.

    ``codes`` contains the codes of the nodes' reasons, (n,). The function replaces the codes of
    nodes whose GPUs are allocated by DRA.
    """
    if not request.may_use_dra:
        return np.zeros(len(rows), bool)
    by_dra: Mask = codes == _DRA
    if not by_dra.any():
        return by_dra
    places = by_dra.nonzero()[0]
    by_dra[places] = [is_served(request, snap.nodes[row]) for row in rows[places].tolist()]
    codes[places] = np.where(by_dra[places], 0, _NO_RESOURCE)
    return by_dra
