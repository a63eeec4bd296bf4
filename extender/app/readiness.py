"""Whether a replica sees the cluster well enough to decide; a sentence that says what is missing.

The sentences hold no figures: kube-scheduler shows them on pods, and a text that changes with each
attempt would change the pod each time.
"""

from collections.abc import Iterable

from extender.kube.watch_health import Health

#: Placing does without them: while they are not known nobody is evicted for others.
DISPENSABLE = ("poddisruptionbudgets",)


def unready(health: Iterable[Health], blind_after_s: float) -> str:
    """Empty where every kind that placing needs was listed, and heard of in the last
    ``blind_after_s`` seconds."""
    seen = [h for h in health if h.kind not in DISPENSABLE]
    if waiting := [h.kind for h in seen if not h.synced]:
        return f"Headroom has not yet listed: {', '.join(waiting)}"
    if any(h.contact_age_s is None or h.contact_age_s > blind_after_s for h in seen):
        return "Headroom has not heard from the API server for too long to decide"
    return ""
