"""The recommended request of one pod, and whether the pod would fit with it."""

from collections.abc import Sequence
from dataclasses import replace

from headroom.console.facts.fixes import request_memory
from headroom.console.facts.request_whatif import Amounts, with_amounts
from headroom.console.facts.suggestions import Suggestion, but_not_checked
from headroom.console.view_context import Context
from headroom.contract.annotations import VRAM, Bytes, VramAnnotation, render_vram
from headroom.contract.kube import Pod
from headroom.contract.quantity import gib
from headroom.core.placement.capacity import largest_devices
from headroom.core.placement.fit import Verdicts, fit
from headroom.core.placement.request import VramRequest
from headroom.core.placement.snapshot import Snapshot
from headroom.core.recommend.families import profile_controller
from headroom.core.recommend.profile_status import newest_requests, restored
from headroom.core.rules.eligible_nodes import Feasible


def recommended(context: Context, pod: Pod, request: VramRequest, snap: Snapshot) -> dict[str, int]:
    """Return the recommended request of each container in bytes, by the container's name.

    A request is at most the size of the largest device in ``snap``. Containers without a
    recommendation are left out.
    """
    profile = context.profiles.of(pod.metadata.namespace, profile_controller(pod, ""))
    if profile is None:
        return {}
    amounts = newest_requests(profile.status, context.wall_s(), largest_devices(snap))
    names = {ask.name for ask in request.containers}
    return {name: amount for name, amount in amounts.items() if name in names}


def recommended_text(amounts: dict[str, int]) -> str | None:
    """Return the annotation with these amounts, or None if there are none."""
    by_container = {name: Bytes(amount) for name, amount in amounts.items()}
    if len(by_container) == 1:
        return render_vram(VramAnnotation(everywhere=next(iter(by_container.values()))))
    return render_vram(VramAnnotation(by_container=by_container)) or None


def lower_as_recommended(
    context: Context, pod: Pod, verdicts: Verdicts, candidates: Feasible
) -> list[Suggestion]:
    """Suggest the recommended request for a pending pod that fits on a node only with this
    request."""
    amounts = recommended(context, pod, verdicts.request, verdicts.snap.part(verdicts.rows))
    changed = with_amounts(context.cluster, Amounts(pod, amounts, 0)) if amounts else None
    if changed is None or verdicts.fits.any():
        return []
    nodes = int(fit(changed[1], verdicts.snap, verdicts.rows, verdicts.now_s).fits.sum())
    if not nodes:
        return []
    on = "1 node" if nodes == 1 else f"{nodes} nodes"
    sentence = (
        f"lower {VRAM} to {changed[0].annotation(VRAM)}, as recommended from past lives of this "
        f"workload: the pod fits on {on}{but_not_checked(candidates.not_checked())}"
    )
    fix = request_memory(pod, changed[0].annotation(VRAM) or "")
    return [Suggestion("recommended", sentence, nodes=nodes, recreates=True, fix=fix)]


def above_recorded_peaks(
    context: Context, pod: Pod, suggestions: Sequence[Suggestion]
) -> list[Suggestion]:
    """Leave out suggestions to request less than recorded lives of the workload used, and add to
    the others what these lives used."""
    profile = context.profiles.of(pod.metadata.namespace, profile_controller(pod, ""))
    containers = restored(profile.status).containers.values() if profile else ()
    peak_bytes, _ = max((each.highest() for each in containers), default=(0, 0))
    kept = []
    for each in suggestions:
        if each.lower_to_bytes is not None and peak_bytes:
            if each.lower_to_bytes < peak_bytes:
                continue
            used = f"; its recorded lives used at most {gib(peak_bytes, up=True)}"
            each = replace(each, sentence=each.sentence + used)
        kept.append(each)
    return kept
