"""The doctor's rule about pods that start alone without a probe."""

from collections.abc import Iterator

from extender.doctor.findings import Finding, Weight
from extender.placement.request import VramRequest
from extender.placement.start_phase import lacks_probe
from extender.state.cluster_state import ClusterState


def examine_starts(state: ClusterState) -> Iterator[Finding]:
    """Yield a finding if the readiness of pods that start alone shows nothing."""
    names: list[str] = []
    for pod in state.pods():
        request = state.understand(pod)
        if (
            isinstance(request, VramRequest)
            and request.starts_alone
            and not pod.ended
            and lacks_probe(pod, {ask.name for ask in request.containers})
        ):
            names.append(f"{pod.metadata.namespace}/{pod.metadata.name}")
    if names:
        yield Finding(
            Weight.ADVICE,
            tuple(sorted(names)),
            "these pods start alone, and a GPU container has no readiness or startup probe: their "
            "start ends only when the agent finds that its memory use has settled, or times out",
            "add a readinessProbe that succeeds when the model is loaded: "
            "docs/how-to/starting-alone.md",
        )
