"""The doctor's rule about pods that take GPU memory which other pods have reserved."""

from collections.abc import Iterator

from extender.doctor.findings import Finding, Weight
from extender.state.cluster_state import ClusterState
from extender.state.overuse_decisions import overusing_pods

#: Outcomes of pods that Headroom does not evict now, although other pods lack memory.
_KEPT = ("protected", "rejected")


def examine_overuse(state: ClusterState, now_s: float) -> Iterator[Finding]:
    """Yield a finding about the nodes where such pods are not evicted."""
    names = sorted(
        node.name
        for node in state.snapshot().nodes
        if any(each.outcome in _KEPT for each in overusing_pods(state, node, now_s, False))
    )
    if not names:
        return
    to_do = (
        "kubectl headroom top pod shows these pods, and why they are not evicted: delete one, or "
        "request more for them"
    )
    if not state.rules.evict_overuse:
        to_do += "; or set on_overuse: evict (docs/how-to/overuse.md)"
    found = (
        "pods use more GPU memory than they reserved, so other pods lack memory that they reserved"
    )
    yield Finding(Weight.WARNING, tuple(names), found, to_do)
