"""Decides whether a replica has seen enough of the cluster for decisions, and reports what is
missing.

The sentences contain no numbers, because kube-scheduler shows them on pods, and a text that changed
with each attempt would update the pod each time."""

from collections.abc import Iterable

from headroom.runtime.kube.resources import Health

#: Kinds that are not needed to place pods. No pod is preempted until they are listed.
DISPENSABLE = ("poddisruptionbudgets",)


def unready(health: Iterable[Health], blind_after_s: float) -> str:
    """Return why no decision is possible yet, or "". Placement requires that each kind was listed,
    and that its watch had contact with the API server in the last ``blind_after_s`` seconds."""
    seen = [h for h in health if h.kind not in DISPENSABLE]
    if waiting := [h.kind for h in seen if not h.synced]:
        return f"Headroom has not yet listed: {', '.join(waiting)}"
    if any(h.contact_age_s is None or h.contact_age_s > blind_after_s for h in seen):
        return "Headroom has had no contact with the API server for too long to decide"
    return ""
