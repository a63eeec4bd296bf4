"""Rules of the doctor about pods that wait for steering, overuse memory, start alone, or use GPUs
without requesting any."""

from collections.abc import Iterator

from headroom.contract.annotations import VRAM
from headroom.contract.quantity import gib
from headroom.contract.reasons import Reason
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.unmanaged_gpus import unmanaged_requests
from headroom.core.overuse.decisions import overusing_pods
from headroom.core.placement.fit import Verdicts, fit
from headroom.core.placement.request import Kind, VramRequest
from headroom.core.placement.snapshot import CODE_OF, Mask
from headroom.core.rules.eligible_nodes import eligibility_key, eligible_nodes
from headroom.core.starting_alone.phase import lacks_probe
from headroom.core.whatif.steering_whatif import steering_gain
from headroom.doctor.findings import Finding, Weight

#: Maximum number of kinds of requests that are compared with all nodes.
_MAX_KINDS = 64
#: Outcomes of pods that Headroom does not evict now, although other pods lack memory.
_KEPT = ("protected", "rejected")


def examine_steering(state: Cluster, now_s: float) -> Iterator[Finding]:
    """Yield a finding if steering would place pending pods. It names the nodes to steer."""
    gain = steering_gain(state, state.snapshot(), now_s)
    if gain is None:
        return
    first, *others = gain.nodes
    to_do = f"{first.to_do}; docs/concepts/device-choice.md compares the choices"
    if others:
        to_do = f"begin with one node: {to_do}"
    names = tuple(sorted(each.node for each in gain.nodes))
    yield Finding(Weight.ADVICE, names, gain.sentence, to_do)


def examine_several(state: Cluster, now_s: float) -> Iterator[Finding]:
    """Yield a finding about pending pods that wait only because the device plugin rejects
    containers with several replicas."""
    snap = state.snapshot()
    found_by_kind: dict[tuple[Kind, bytes], tuple[frozenset[str], int]] = {}
    waiting, waiting_bytes, names = 0, 0, set[str]()
    for pod in state.unbound():
        request = state.understand(pod)
        if not isinstance(request, VramRequest) or all(ask.widest < 2 for ask in request.asks):
            continue
        key = request.kind, eligibility_key(pod)
        if key not in found_by_kind:
            if len(found_by_kind) == _MAX_KINDS:
                continue
            rows = eligible_nodes(pod, snap, state.node).rows
            verdicts = fit(request, snap, rows, now_s)
            rejecting = verdicts.codes == CODE_OF[Reason.TOO_MANY_SHARED]
            if verdicts.fits.any():
                rejecting &= False
            nodes = frozenset(snap.names[row] for row in rows[rejecting].tolist())
            found_by_kind[key] = nodes, _need_bytes(verdicts, rejecting)
        nodes, need_bytes = found_by_kind[key]
        waiting += bool(nodes)
        waiting_bytes += need_bytes
        names |= nodes
    if waiting:
        with_bytes = f"with {gib(waiting_bytes)}"
        pods = f"{waiting} pending pods {with_bytes} request"
        if waiting == 1:
            pods = f"1 pending pod {with_bytes} requests"
        yield Finding(
            Weight.ADVICE,
            tuple(sorted(names)),
            f"{pods} several shared GPUs for one container, which the device plugin rejects "
            "(failRequestsGreaterThanOne)",
            "steer the nodes and set failRequestsGreaterThanOne: false in the device plugin's "
            "configuration: docs/how-to/one-pool.md",
        )


def _need_bytes(verdicts: Verdicts, rejecting: Mask) -> int:
    """Return the bytes that the pod needs on all its devices of the nodes that reject it, at most,
    or 0 if there is no such node."""
    return sum(
        ask.ask.widest * int(ask.need_bytes[rejecting].max(initial=0)) for ask in verdicts.asks
    )


def examine_overuse(state: Cluster, now_s: float) -> Iterator[Finding]:
    """Yield a finding for nodes where pods use the reserved memory of others but are not
    evicted."""
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


def examine_starts(state: Cluster) -> Iterator[Finding]:
    """Yield a finding about pods that start alone without a probe that shows when they are
    ready."""
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


def examine_users(state: Cluster) -> Iterator[Finding]:
    """Yield a finding about pods that use GPUs without requesting any."""
    pods, manages = state.gpu_users.values(), state.rules.manages
    users = [pod for pod in pods if not unmanaged_requests(pod, manages)]
    if users:
        yield Finding(
            Weight.WARNING,
            tuple(sorted(f"{pod.metadata.namespace}/{pod.metadata.name}" for pod in users)),
            "these pods use GPUs but request none, for example because their image sets "
            "NVIDIA_VISIBLE_DEVICES: no memory is reserved for them, so Headroom considers only "
            "what they use at the moment",
            f"request a GPU and {VRAM} in these pods; or hide the GPUs from them with the variable "
            "NVIDIA_VISIBLE_DEVICES: void",
        )
