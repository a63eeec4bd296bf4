"""Suggests what to change so that a pod fits that now fits on no node.

Suggestions are: end the old pod of a rolling update first, wait for a pod, limit pods that use more
than they reserved, make more nodes eligible, steer or repair a node, raise the replicas, raise the
limit of SM activity, remove NVIDIA_VISIBLE_DEVICES, or request less. A suggestion is made only if
the pod fits with it in a simulation on the snapshot.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import msgspec
import numpy as np

from headroom.console.facts import fixes
from headroom.console.facts.device_occupants import Held
from headroom.console.facts.rollouts import replaced, same_workload
from headroom.contract.annotations import MAX_SM, VRAM
from headroom.contract.foreign_keys import VISIBLE_DEVICES
from headroom.contract.kube import Pod
from headroom.contract.quantity import gib, parse_bytes, quantity_up_to
from headroom.contract.reasons import Reason
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.capacity import least_need_bytes
from headroom.core.placement.explain import Explanation, failing
from headroom.core.placement.fit import Verdicts, fit
from headroom.core.placement.request import VramRequest
from headroom.core.placement.snapshot import CODE_OF
from headroom.core.placement.visible_devices import Visible
from headroom.core.rules.eligible_nodes import Feasible, Obstacle
from headroom.core.whatif.node_whatif import rejection_beside
from headroom.core.whatif.simulation import Simulation
from headroom.core.whatif.steering_whatif import choice_text, helped_by_steering, nodes_text

#: The console adds the kind "recommended".
Kind = Literal[
    "rollout",
    "lower",
    "recommended",
    "wait",
    "overuse",
    "eligible",
    "steer",
    "repair",
    "replicas",
    "activity",
    "variable",
    "quota",
]
#: Faults of a node whose memory is known, so that a repair can be simulated.
_FAULTS = (Reason.STALE_REPORT, Reason.UNHEALTHY_DEVICE, Reason.COMPUTE_MODE)
#: Maximum number of suggested repairs.
_MAX_REPAIRS = 3
#: Maximum number of pods to remove, and of nodes to change, in simulations. Each takes 1 ms.
_MAX_SIMULATED = 8
#: Maximum number of obstacles for which there is a suggestion.
_MAX_OBSTACLES = 3


@dataclass(frozen=True, slots=True)
class Suggestion:
    kind: Kind
    sentence: str
    #: The node that the suggestion is about; empty if there are several.
    node: str = ""
    #: The pod to wait for, or the pod that uses more memory than it reserved.
    held: Held | None = None
    #: Maximum bytes to request per device; None for other kinds of suggestions.
    lower_to_bytes: int | None = None
    #: Number of nodes that the suggestion applies to.
    nodes: int = 1
    #: Whether the pod must be deleted and created again.
    recreates: bool = False
    #: A command or YAML from ``fixes`` that applies the suggestion, or empty if there is no such
    #: fix.
    fix: str = ""


def suggest(
    cluster: Cluster,
    pod: Pod,
    verdicts: Verdicts,
    explanation: Explanation,
    holding: Sequence[Sequence[Held]],
    where: Feasible,
) -> list[Suggestion]:
    """Return suggestions for the pod, or none if it fits on some node.

    ``verdicts`` are the verdicts on the nodes in ``where``. ``holding`` lists the blockers of each
    of the nearest nodes. Snapshots do not contain quotas; ``within_quotas`` considers them.
    """
    if explanation.fits or not verdicts.asks:
        return []
    return [
        *_rollout(cluster, pod, verdicts, where),
        *_wait(cluster, pod, verdicts, explanation, holding, where),
        *_overuse(explanation, holding),
        *_eligible(verdicts, where),
        *_steer(cluster, verdicts, where),
        *_repair(cluster, verdicts, where),
        *_more_replicas(cluster, verdicts, where.not_modeled),
        *_without_max_sm(verdicts, explanation, where.not_modeled),
        *_remove_variable(verdicts, where),
        # A lower request comes last, because it helps only if the pod requests more than it needs.
        *_lower(cluster, pod, verdicts, explanation, where.not_checked()),
    ]


def within_quotas(found: Sequence[Suggestion], beyond: str | None) -> list[Suggestion]:
    """Leave out suggestions that are dangerous because a quota is exceeded.

    Some suggestions need the pod to be deleted and created again. If a quota is exceeded, the API
    server could reject the new pod, and the pod would be lost. ``beyond`` is the result of
    ``pod_requests.exceeded``, or None if the quotas cannot be read.
    """
    if beyond == "":
        return list(found)
    if beyond is None:
        unchecked = " (not checked: ResourceQuotas, which could reject the new pod)"
        return [
            replace(each, sentence=each.sentence + unchecked) if each.recreates else each
            for each in found
        ]
    kept = [each for each in found if not each.recreates]
    if len(kept) == len(found):
        return kept
    sentence = (
        f"raise the quota before you change the pod: {beyond}; a pod that is deleted and created "
        "again could be rejected"
    )
    return [*kept, Suggestion("quota", sentence)]


def but_not_checked(checks: Iterable[str]) -> str:
    """Return the end of a sentence that lists the checks that were not made; "" if all were
    made."""
    names = ", ".join(checks)
    return f" (not checked: {names})" if names else ""


def _rollout(
    cluster: Cluster, pod: Pod, verdicts: Verdicts, where: Feasible
) -> Iterator[Suggestion]:
    """Suggest that a rolling update ends old pods first if the new pod needs their memory."""
    request, now_s = verdicts.request, verdicts.now_s
    for old in replaced(cluster, pod, verdicts, _MAX_SIMULATED):
        held = verdicts.snap.held.get(old.node, {})
        if not rejection_beside(cluster, request, old.node, (), now_s, old.uids, held):
            checks = but_not_checked(where.not_checked(verdicts.snap.row_of[old.node]))
            yield Suggestion("rollout", f"{old.sentence}{checks}", old.node, fix=old.fix)
            return


def _lower(
    cluster: Cluster,
    pod: Pod,
    verdicts: Verdicts,
    explanation: Explanation,
    not_checked: Sequence[str],
) -> Iterator[Suggestion]:
    """Suggest the largest amount that fits now, unless it is less than half of what the pod
    requests, because few programs can run with so much less. Past lives of the workload may show
    that it can; ``pod_recommendation`` suggests this."""
    text = quantity_up_to(explanation.largest_fitting_bytes or 0)
    lower_bytes = parse_bytes(text)
    if not lower_bytes:
        return
    if lower_bytes * 2 < least_need_bytes(verdicts):
        return
    annotations = {**(pod.metadata.annotations or {}), VRAM: text}
    metadata = msgspec.structs.replace(pod.metadata, annotations=annotations)
    request = cluster.understand(msgspec.structs.replace(pod, metadata=metadata))
    if not isinstance(request, VramRequest):
        return
    nodes = int(fit(request, verdicts.snap, verdicts.rows, verdicts.now_s).fits.sum())
    if nodes:
        now = "that much is free now" if not_checked else "that fits now"
        sentence = (
            f"if the program needs no more than {text}, lower {VRAM} to it: {now}"
            f"{but_not_checked(not_checked)}"
        )
        fix = fixes.request_memory(pod, text)
        yield Suggestion("lower", sentence, "", None, lower_bytes, nodes, True, fix)


def _wait(
    cluster: Cluster,
    pod: Pod,
    verdicts: Verdicts,
    explanation: Explanation,
    holding: Sequence[Sequence[Held]],
    where: Feasible,
) -> Iterator[Suggestion]:
    """Suggest waiting until a pod has ended or started.

    Chooses the smallest pod without which the pod fits on one of the nearest nodes. Pods of the
    same workload are left out, because their controller would create them again."""
    waits_for_start = {
        node.node for node in explanation.nearest if node.reason is Reason.OTHER_STARTING
    }
    candidates = [
        (0 if node.node in waits_for_start else held.charged_bytes, node.node, held)
        for node, occupants in zip(explanation.nearest, holding, strict=True)
        for held in occupants
        # A pod that holds less than the missing memory does not help. If only a replica is missing,
        # any pod may help. A pod that is not bound yet cannot be waited for.
        if held.charged_bytes >= (node.short_bytes or 0)
        and (
            node.node in waits_for_start
            or held.phase in ("ending", "gone")
            or not same_workload(pod, cluster.pod(held.uid))
        )
        and held.uid not in verdicts.snap.held.get(node.node, ())
    ]
    candidates.sort(key=lambda each: (each[0], each[1], each[2].uid))
    for _, node, held in islice(candidates, _MAX_SIMULATED):
        beside, now_s = verdicts.snap.held.get(node, {}), verdicts.now_s
        if not rejection_beside(cluster, verdicts.request, node, (), now_s, {held.uid}, beside):
            name, size = f"{held.namespace}/{held.name}", gib(held.charged_bytes)
            since = f" since {held.since[:19]}Z" if held.since else ""
            unchecked = but_not_checked(where.not_checked(verdicts.snap.row_of[node]))
            if node in waits_for_start:
                does, until = f"is starting on node {node}{since}", "when it has started"
            else:
                does, until = f"holds {size} on node {node}{since}", "when it ends"
            sentence = f"wait for pod {name}, which {does}: {until}, the pod fits{unchecked}"
            yield Suggestion("wait", sentence, node, held)
            return


def _overuse(explanation: Explanation, holding: Sequence[Sequence[Held]]) -> Iterator[Suggestion]:
    """Name pods that exceed their reservations if only their overuse makes a nearest node too
    full."""
    for node, occupants in zip(explanation.nearest, holding, strict=True):
        # If Headroom chooses, devices that lack more memory than the best set do not matter.
        most_bytes = max((each.short_bytes for each in node.candidates), default=0)
        decisive_bytes = most_bytes if node.short_bytes is None else node.short_bytes
        short = [each for each in node.candidates if 0 < each.short_bytes <= decisive_bytes]
        over = {
            holder.uid: holder.charged_bytes - holder.requested_bytes
            for each in short
            for holder in each.terms.holders
            if holder.charged_bytes > holder.requested_bytes
        }
        enough = all(
            sum(over.get(holder.uid, 0) for holder in each.terms.holders) >= each.short_bytes
            for each in short
        )
        worst = max(over, key=lambda uid: (over[uid], uid), default="")
        held = next((each for each in occupants if each.uid == worst), None)
        if held is not None and enough:
            several = f" and {len(over) - 1} more" if len(over) > 1 else ""
            sentence = (
                f"limit pod {held.namespace}/{held.name}{several} on node {node.node}, which uses "
                f"{gib(over[worst], up=True)} more than it reserved: without this overuse, the "
                "pod fits there (kubectl headroom top pod shows whether it is evicted)"
            )
            yield Suggestion("overuse", sentence, node.node, held)
            return


def _eligible(verdicts: Verdicts, where: Feasible) -> Iterator[Suggestion]:
    """Suggest removing an obstacle if the pod fits on nodes that only this obstacle excludes."""
    single = {row: found[0] for row, found in where.eligible.obstacles.items() if len(found) == 1}
    rows = np.array(list(single), np.int64)
    fitting = rows[fit(verdicts.request, verdicts.snap, rows, verdicts.now_s).fits].tolist()
    counts = Counter(single[row] for row in fitting)
    for obstacle, nodes in counts.most_common(_MAX_OBSTACLES):
        first = min(verdicts.snap.nodes[row].name for row in fitting if single[row] == obstacle)
        # kube-scheduler has not run its other checks on these nodes.
        sentence = f"{_without(obstacle, nodes, first)}{but_not_checked(where.not_modeled)}"
        node, recreates = first if nodes == 1 else "", obstacle.code != "cordoned"
        fix = fixes.tolerate(obstacle.what) if obstacle.code == "taint" else ""
        fix = fix if recreates else fixes.uncordon(first)
        yield Suggestion("eligible", sentence, node, nodes=nodes, recreates=recreates, fix=fix)


def _without(obstacle: Obstacle, nodes: int, first: str) -> str:
    would_fit = f"the pod would fit on {_nodes(nodes, first)}"
    match obstacle.code:
        case "cordoned":
            return f"uncordon: {would_fit}, but {'it is' if nodes == 1 else 'they are'} cordoned"
        case "taint":
            return f"add a toleration for taint {obstacle.what}: {would_fit}"
        case "selector":
            return f"change nodeSelector {obstacle.what}: {would_fit}"
        case _:
            return f"change the required node affinity: {would_fit}"


def _nodes(nodes: int, first: str) -> str:
    return f"node {first}" if nodes == 1 else f"{nodes} nodes, such as {first}"


def _steer(cluster: Cluster, verdicts: Verdicts, where: Feasible) -> Iterator[Suggestion]:
    """Suggest steering for nodes that reject the pod only because the plugin could choose a full
    device."""
    if helped := helped_by_steering(cluster, verdicts):
        first, nodes = helped[0].node, len(helped)
        checks = where.not_checked(verdicts.snap.row_of[first.node])
        if not first.known:
            checks = (*checks, "whether the agent may steer")
        sentence = (
            f"steer {nodes_text(helped)}: the pod would fit there if {choice_text(helped)}"
            f"{but_not_checked(checks)}; {first.to_do}"
        )
        fix = first.command if first.to_do == first.command else ""
        yield Suggestion("steer", sentence, first.node, nodes=nodes, fix=fix)


def _repair(cluster: Cluster, verdicts: Verdicts, where: Feasible) -> Iterator[Suggestion]:
    """Suggest repairing nodes on which the pod would fit if they had no fault."""
    faulty = np.flatnonzero(np.isin(verdicts.codes, [CODE_OF[reason] for reason in _FAULTS]))
    found = (i for i in faulty.tolist() if len(list(failing(verdicts, i))) == 1)
    repairable = (
        i
        for i in islice(found, _MAX_SIMULATED)
        if _fits_if(cluster, verdicts, _name(verdicts, i), Simulation.repair)
    )
    for i in islice(repairable, _MAX_REPAIRS):
        row = int(verdicts.rows[i])
        node, (fault,) = verdicts.snap.nodes[row], failing(verdicts, i)
        what = fault.sentence
        if fault is not Reason.STALE_REPORT:
            details = (
                f"{t.device.uuid}: {t.health_detail}"
                for t in node.devices
                if t.health_issue is fault
            )
            what += f" ({next(details)})"
        sentence = (
            f"repair node {node.name}: the pod would fit there, but {what}"
            f"{but_not_checked(where.not_checked(row))}"
        )
        yield Suggestion("repair", sentence, node.name)


def _more_replicas(
    cluster: Cluster, verdicts: Verdicts, not_checked: Sequence[str]
) -> Iterator[Suggestion]:
    """Suggest more replicas on nodes where one more replica per shared device makes the pod fit."""
    candidates = np.flatnonzero(verdicts.codes == CODE_OF[Reason.NO_REPLICA])
    # Try nodes with the most headroom first, because the pod is most likely to fit there.
    candidates = candidates[
        np.argsort(-verdicts.snap.node_headroom_bytes[verdicts.rows[candidates]], kind="stable")
    ]
    names = [_name(verdicts, i) for i in candidates[:_MAX_SIMULATED].tolist()]
    helped = sorted(
        name for name in names if _fits_if(cluster, verdicts, name, Simulation.add_replica)
    )
    if helped:
        nodes, first = len(helped), helped[0]
        sentence = (
            f"raise the replicas that the device plugin advertises on {_nodes(nodes, first)}: "
            f"enough memory is free there, but no replica{but_not_checked(not_checked)}"
        )
        yield Suggestion("replicas", sentence, first if nodes == 1 else "", nodes=nodes)


def _without_max_sm(
    verdicts: Verdicts, explanation: Explanation, not_checked: Sequence[str]
) -> Iterator[Suggestion]:
    """Suggest another limit of SM activity if only this limit keeps the pod off some node."""
    if verdicts.request.max_sm_ppm is None:
        return
    request = replace(verdicts.request, max_sm_ppm=None)
    fitting = fit(request, verdicts.snap, verdicts.rows, verdicts.now_s).fits
    if not (nodes := int(fitting.sum())):
        return
    first = _name(verdicts, int(np.flatnonzero(fitting)[0]))
    activities = [each.terms.activity for node in explanation.nearest for each in node.candidates]
    do = f"raise or remove {MAX_SM}"
    if not any(activities):
        do = f"let a source measure SM activity (docs/how-to/sm-activity.md), or remove {MAX_SM}"
    sentence = f"{do}: without this limit the pod fits on {_nodes(nodes, first)}"
    node = first if nodes == 1 else ""
    sentence += but_not_checked(not_checked)
    yield Suggestion("activity", sentence, node, nodes=nodes, recreates=True)


def _remove_variable(verdicts: Verdicts, where: Feasible) -> Iterator[Suggestion]:
    """Suggest removing NVIDIA_VISIBLE_DEVICES if only this variable keeps the pod off some node."""
    if verdicts.request.visible is not Visible.REJECTED:
        return
    request = replace(verdicts.request, visible=Visible.BY_PLUGIN)
    fitting = fit(request, verdicts.snap, verdicts.rows, verdicts.now_s).fits
    if not (nodes := int(fitting.sum())):
        return
    first = _name(verdicts, int(np.flatnonzero(fitting)[0]))
    sentence = (
        f"remove {VISIBLE_DEVICES} from the env of the pod's containers, and from their envFrom: "
        f"without it the pod fits on {_nodes(nodes, first)}{but_not_checked(where.not_checked())}"
    )
    node = first if nodes == 1 else ""
    yield Suggestion("variable", sentence, node, nodes=nodes, recreates=True)


def _name(verdicts: Verdicts, i: int) -> str:
    return verdicts.snap.nodes[int(verdicts.rows[i])].name


def _fits_if(
    cluster: Cluster, verdicts: Verdicts, node: str, change: Callable[[Simulation, str], None]
) -> bool:
    """Return whether the pod would fit on the node after this change."""
    simulation = Simulation(cluster, verdicts.snap, verdicts.now_s)
    try:
        change(simulation, node)
    except (KeyError, ValueError):  # the change is not possible
        return False
    return simulation.fits(verdicts.request, node)
