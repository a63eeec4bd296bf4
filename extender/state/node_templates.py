"""Answers for nodes that are not in the cluster yet: an autoscaler's templates.

A new node is empty, so what its labels say of its GPUs is enough, whatever ``require_report`` says
of the nodes that are there: nothing on it could be measured. Before a pod is bound to the node,
bind asks for the agent's report as always.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from contract.gpunode import SM_SOURCES, GPUNode, GPUNodeSpec, SmActivity
from contract.kube import Node, NodeStatus, ObjectMeta
from contract.reasons import Reason
from extender.placement.fit import Codes, fit
from extender.placement.fit_cache import NEVER_STALE_S
from extender.placement.policy import Rules
from extender.placement.request import VramRequest
from extender.placement.snapshot import CODE_OF
from extender.state.changes import Event, GPUNodeSeen, NodeSeen
from extender.state.cluster_state import ClusterState
from extender.state.label_inventory import believed

#: Nodes of one call that are looked at; the others count as unknown.
MOST_NODES = 100


class _Status(NodeStatus, frozen=True):
    capacity: Mapping[str, str | int] | None = None


class _Node(Node, frozen=True):
    status: _Status | None = None


_decode = msgspec.json.Decoder(_Node).decode


def codes_of_new(items: Sequence[msgspec.Raw], request: VramRequest, rules: Rules) -> Codes:
    """The code of each node's reason; 0 where the pod fits. Nodes that cannot be read stay
    unknown."""
    codes = np.full(len(items), CODE_OF[Reason.UNKNOWN_NODE], np.int8)
    read = {}
    for place, item in enumerate(items[:MOST_NODES]):
        try:
            read[place] = _decode(item)
        except (ValueError, RecursionError):  # msgspec raises UnicodeDecodeError too
            continue
    imagined = ClusterState(replace(rules, require_report=False), 0.0, 0.0)
    imagined.apply(e for node in read.values() for e in _as_ready(node, imagined.rules))
    snap = imagined.snapshot()
    rows = snap.rows([node.metadata.name for node in read.values()])
    codes[list(read)] = fit(request, snap, rows, NEVER_STALE_S).codes
    return codes


def _as_ready(node: _Node, rules: Rules) -> tuple[Event, ...]:
    """The node when its agent has reported what its labels say, and nothing is reserved on it."""
    status = node.status
    if status is not None and status.allocatable is None:  # Kubernetes' own default
        status = msgspec.structs.replace(status, allocatable=status.capacity)
    node = msgspec.structs.replace(node, status=status)
    report = believed(node, rules)
    if report is not None:
        none = SmActivity(0.0, SM_SOURCES[0])
        idle = [msgspec.structs.replace(each, sm_activity=none) for each in report.devices]
        report = msgspec.structs.replace(report, devices=idle)
    metadata, spec = ObjectMeta(name=node.metadata.name), GPUNodeSpec(initialised=True)
    return NodeSeen(node), GPUNodeSeen(GPUNode(metadata=metadata, spec=spec, status=report), 0.0)
