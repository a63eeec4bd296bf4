"""The doctor's rule about pods that wait only because the device plugin chooses the device."""

from collections.abc import Iterator

from extender.doctor.findings import Finding, Weight
from extender.state.cluster_state import ClusterState
from extender.state.steering_whatif import steering_gain


def examine_steering(state: ClusterState, now_s: float) -> Iterator[Finding]:
    """Yield a finding if steering would place pending pods; it names the nodes to steer."""
    gain = steering_gain(state, state.snapshot(), now_s)
    if gain is None:
        return
    first, *others = gain.nodes
    to_do = f"{first.to_do}; docs/concepts/modes.md compares the modes"
    if others:
        to_do = f"begin with one node: {to_do}"
    names = tuple(sorted(each.node for each in gain.nodes))
    yield Finding(Weight.ADVICE, names, gain.sentence, to_do)
