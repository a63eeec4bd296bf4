"""The doctor's rules about recommended requests, and about the recorder that they depend on."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from headroom.contract.annotations import VRAM_REQUESTED, Bytes
from headroom.contract.commands import command
from headroom.contract.kube import Pod
from headroom.contract.quantity import gib
from headroom.contract.timestamps import age
from headroom.contract.vramprofile import VRAMProfile
from headroom.contract.watched import Relisted
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.idle_pods import owner_of
from headroom.core.placement.request import VramRequest
from headroom.core.recommend.families import profile_controller
from headroom.core.recommend.profile_status import newest_requests
from headroom.doctor.findings import Finding, Weight
from headroom.runtime.kube.profiles import Profiles

#: A request is a finding if it exceeds the recommendation by both this factor and this number of
#: bytes.
LARGE_RATIO = 2.0
LARGE_BYTES = 2 << 30
#: An older pod is in its owner's profile, provided that the agent measures the pod's memory.
PROFILED_AFTER_S = 3600.0


def examine_recommendations(
    state: Cluster, profiles: Sequence[VRAMProfile], wall_s: float
) -> Iterator[Finding]:
    """Yield findings about pods with ``auto`` that have no profile, and about large requests."""
    known = Profiles()
    known.apply([Relisted(VRAMProfile, tuple(profiles), 0.0)])
    unknown: list[str] = []
    freed: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for pod in state.pods():
        if pod.ended or not pod.node:
            continue
        metadata = pod.metadata
        profile = known.of(metadata.namespace, profile_controller(pod, ""))
        if profile is not None:
            if frees_bytes := _frees_bytes(state, pod, profile, wall_s):
                kind, name = owner_of(pod)
                owner = f"{kind or 'Pod'} {metadata.namespace}/{name or metadata.name}"
                freed[metadata.namespace][owner] += frees_bytes
        elif (
            VRAM_REQUESTED in (metadata.annotations or {})
            and (age(metadata.creation_timestamp or "", wall_s) or 0.0) >= PROFILED_AFTER_S
        ):
            unknown.append(f"{metadata.namespace}/{metadata.name}")
    if unknown:
        yield Finding(
            Weight.ADVICE,
            tuple(sorted(unknown)),
            "these pods request headroom.gpu/vram: auto, and no VRAMProfile has their owner, so "
            "each pod gets its default",
            "check that the agent measures them: kubectl headroom top pod -A shows their use; and "
            "that the recorder runs: kubectl -n headroom-system logs deployment/headroom-recorder",
        )
    for namespace, owners in sorted(freed.items()):
        yield Finding(
            Weight.ADVICE,
            tuple(sorted(owners, key=lambda owner: (-owners[owner], owner))),
            "the pods request at least twice what past lives needed: "
            f"{gib(sum(owners.values()))} more than recommended",
            command("kubectl", "headroom", "recommend", "-n", namespace, "-o", "patch")
            + " prints the commands that lower the requests",
        )


def _frees_bytes(state: Cluster, pod: Pod, profile: VRAMProfile, wall_s: float) -> int:
    """Return how many bytes would become free if the pod's large requests were lowered to the
    recommendation."""
    request = state.understand(pod)
    if not isinstance(request, VramRequest):
        return 0
    amounts = newest_requests(profile.status, wall_s, {})
    frees_bytes = 0
    for ask in request.containers:
        then_bytes = amounts.get(ask.name)
        if then_bytes is None or not isinstance(ask.amount, Bytes):
            continue
        now_bytes = ask.amount.count_bytes
        if now_bytes >= max(LARGE_RATIO * then_bytes, then_bytes + LARGE_BYTES):
            frees_bytes += (now_bytes - then_bytes) * ask.count
    return frees_bytes
