"""Groups the pending pods by owner, request and cause, with one fix for each group.

Pods of one owner have the same request and the same eligible nodes, so explaining one of them
explains all. Pods that are bound together are listed as their group, whatever they request. Pods
with scheduling gates, or with another scheduler, form a separate group. With 5,000 nodes,
explaining takes tens of milliseconds, so the answer is shared for some seconds, or until a pod is
added or leaves."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from headroom.console.facts.group_report import group_report
from headroom.console.responses import counted
from headroom.console.view import View
from headroom.console.view_context import Context
from headroom.console.views.explain import analysed, verdict_from
from headroom.contract.kube import Pod
from headroom.contract.timestamps import age
from headroom.core.cluster.idle_pods import owner_of
from headroom.core.groups.membership import named_group_of
from headroom.core.placement.request import Unreadable, VramRequest
from headroom.core.placement.snapshot import Snapshot

#: Minimum seconds for which explanations are used if the set of pods stays the same.
SHARED_S = 5.0
#: Explanations are used this many times as long as they took to compute, up to ``MOST_SHARED_S``
#: seconds, because they can take long if the API server does not return the quotas.
SHARED_TIMES, MOST_SHARED_S = 50, 30.0
#: Number of groups that are explained. The others are only counted.
MOST_EXPLAINED = 10


class WaitingView(View):
    """Pending pods of one owner with the same request, or of one group."""

    namespace: str
    owner_kind: str
    """Kind of the owner. It is Pod, with the pod's own name, for a pod without an owner, and
    PodGroup for pods that are bound together."""
    owner_name: str
    pods: int
    name: str
    """The pod that has waited longest."""
    oldest_s: float | None
    request: str
    """For example "1 x nvidia.com/gpu with 8Gi"; empty if the pods of a group differ."""
    verdict: str
    """"fits", "waits", "not_scheduled", "rejected", "gated", "other_scheduler" or "unreadable"."""
    message: str
    """The cause, as a sentence."""
    fix: str | None
    """A change that helps, tried on a copy of the cluster; null if none was found."""


@dataclass(slots=True)
class WaitingGroups:
    """Keeps the last answer for all readers."""

    key: tuple[str, ...] = ()
    until_s: float = float("-inf")
    groups: list[WaitingView] = field(default_factory=list)
    total: int = 0

    def of(self, context: Context, snap: Snapshot) -> tuple[list[WaitingView], int]:
        """Return the groups that have waited longest, and the number of all groups."""
        pods = context.cluster.unbound()
        key = tuple(sorted(pod.metadata.uid for pod in pods))
        now_s = context.monotonic_s()
        if key != self.key or now_s >= self.until_s:
            grouped = sorted(_grouped(pods, context), key=_oldest)
            found = [_view(each, context, snap) for each in grouped[:MOST_EXPLAINED]]
            self.key, self.groups, self.total = key, found, len(grouped)
            took_s = context.monotonic_s() - now_s
            self.until_s = now_s + min(max(SHARED_S, SHARED_TIMES * took_s), MOST_SHARED_S)
        return self.groups, self.total


def _grouped(pods: Iterable[Pod], context: Context) -> list[list[Pod]]:
    """Return the pods of each group, the oldest first."""
    found: dict[tuple[str, ...], list[Pod]] = {}
    for pod in pods:
        cause = pod.spec.scheduler_name or "", "gated" if pod.spec.scheduling_gates else ""
        group = named_group_of(pod)
        asked = group.kind if group else _asked(context.cluster.understand(pod))
        key = pod.metadata.namespace, *_owner(pod), asked, *cause
        found.setdefault(key, []).append(pod)
    return [
        sorted(each, key=lambda pod: pod.metadata.creation_timestamp or "")
        for each in found.values()
    ]


def _owner(pod: Pod) -> tuple[str, str]:
    """Return kind and name of the owner that the answer shows."""
    if (group := named_group_of(pod)) is not None:
        return "PodGroup", group.name
    kind, name = owner_of(pod)
    return (kind, name) if name else ("Pod", pod.metadata.name)


def _asked(request: VramRequest | Unreadable) -> str:
    if isinstance(request, Unreadable):
        return ""
    return ", ".join(
        f"{each.count} x {each.resource} with {each.amount_text}" for each in request.containers
    )


def _oldest(pods: list[Pod]) -> tuple[str, str, str]:
    metadata = pods[0].metadata
    return metadata.creation_timestamp or "", metadata.namespace, metadata.name


def _view(pods: list[Pod], context: Context, snap: Snapshot) -> WaitingView:
    pod = pods[0]
    metadata, (kind, owner) = pod.metadata, _owner(pod)
    request = context.cluster.understand(pod)
    requests = {_asked(context.cluster.understand(each)) for each in pods}
    decision = context.journal.of_uid(metadata.uid)
    offered = decision.offered_nodes.names() if decision and decision.offered_nodes else None
    found = None
    if isinstance(request, VramRequest):
        found = analysed(context, snap, pod, request, offered)
    asked_at_s = decision.at_s if decision else None
    verdict, message = verdict_from(context, pod, request, found, asked_at_s)
    if found and verdict == "rejected" and found.explanation.reasons:
        reason, nodes = found.explanation.reasons[0]
        message = f"{message}; {counted(nodes, 'node')}: {reason.sentence}"
    seen, now_s = context.seen_by(pod, snap), context.monotonic_s()
    report = group_report(context.cluster, pod, seen, now_s)
    if report is not None and verdict in ("fits", "rejected"):
        verdict, message = "fits" if report.all_fit else "rejected", report.sentence
    oldest_s = age(metadata.creation_timestamp or "", context.wall_s())
    return WaitingView(
        namespace=metadata.namespace,
        owner_kind=kind,
        owner_name=owner,
        pods=len(pods),
        name=metadata.name,
        oldest_s=None if oldest_s is None else round(oldest_s, 1),
        request=requests.pop() if len(requests) == 1 else "",
        verdict=verdict,
        message=message,
        fix=found.suggestions[0].sentence if found and found.suggestions else None,
    )
