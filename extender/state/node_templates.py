"""Fits pods on nodes that are not in the cluster yet: an autoscaler's templates.

A new node is empty and nothing on it could be measured. So its labels are enough, whatever
``require_report`` demands of existing nodes. Before a pod is bound to the node, bind still requires
the agent's report.
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
from extender.state.cluster_writer import ClusterWriter
from extender.state.label_inventory import believed

#: Maximum number of nodes that one call examines; the others count as unknown.
MOST_NODES = 100


class _Status(NodeStatus, frozen=True):
    capacity: Mapping[str, str | int] | None = None


class _Node(Node, frozen=True):
    status: _Status | None = None


_decode = msgspec.json.Decoder(_Node).decode


def codes_of_new(items: Sequence[msgspec.Raw], request: VramRequest, rules: Rules) -> Codes:
    """Return the code of each node's reason; 0 if the pod fits. Invalid nodes count as unknown."""
    codes = np.full(len(items), CODE_OF[Reason.UNKNOWN_NODE], np.int8)
    decoded = {}
    for i, item in enumerate(items[:MOST_NODES]):
        try:
            decoded[i] = _decode(item)
        except (ValueError, RecursionError):  # msgspec raises UnicodeDecodeError too
            continue
    state = ClusterWriter(replace(rules, require_report=False), 0.0, 0.0)
    state.apply(e for node in decoded.values() for e in _as_ready(node, state.rules))
    snap = state.snapshot()
    rows = snap.rows([node.metadata.name for node in decoded.values()])
    codes[list(decoded)] = fit(request, snap, rows, NEVER_STALE_S).codes
    return codes


def _as_ready(node: _Node, rules: Rules) -> tuple[Event, ...]:
    """Return the events of an idle node whose agent has reported exactly what its labels state."""
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
