"""Suggestions for a pod that no node takes: request less, wait for a pod, change where the pod may
run, repair a node, raise the replicas. Each is tried before it is given."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import msgspec
import numpy as np

from contract.annotations import VRAM
from contract.gpunode import MAX_REPLICAS
from contract.kube import Pod
from contract.quantity import format_bytes, gib
from contract.reasons import Reason
from extender.placement.comparison import failing
from extender.placement.explain import Explanation, NodeExplanation
from extender.placement.fit import Verdicts, fit
from extender.placement.request import VramRequest
from extender.placement.snapshot import CODE_OF
from extender.state.cluster_state import ClusterState
from extender.state.device_occupants import Held, holders
from extender.state.explained_nodes import Feasible
from extender.state.node_whatif import fits_after_eviction
from extender.state.selectors import Obstacle
from extender.state.simulation import Simulation

Kind = Literal["lower", "wait", "eligible", "mend", "replicas", "quota"]
#: Faults of a node whose memory is known all the same, so that the repair can be tried.
_FAULTS = (Reason.STALE_REPORT, Reason.UNHEALTHY_DEVICE)
#: Nodes to be mended that are named.
_MOST_NAMED = 3
#: Pods whose end is tried, and nodes whose replicas are: each takes a millisecond.
_MOST_TRIED = 8
#: Kinds of obstacles that are named.
_MOST_OBSTACLES = 3


@dataclass(frozen=True, slots=True)
class Suggestions:
    kind: Kind
    sentence: str
    #: The node that is meant; empty where it is none alone.
    node: str = ""
    #: For whose end to wait.
    held: Held | None = None
    #: What to ask for at most, per device; None where that is not the advice.
    lower_to_bytes: int | None = None
    #: How many nodes it is true of.
    nodes: int = 1
    #: Whether the pod must be deleted and created again.
    recreates: bool = False


def advice(
    cluster: ClusterState,
    pod: Pod,
    verdicts: Verdicts,
    explanation: Explanation,
    holding: Sequence[Sequence[Held]],
    where: Feasible,
) -> list[Suggestions]:
    """``verdicts``: of the nodes of ``where``; ``holding``: the blockers of each of the nearest.
    Empty when some node takes the pod. Quotas, which no snapshot knows, are for ``allowed``."""
    if explanation.fits or not verdicts.asks:
        return []
    return [
        *_lower(cluster, pod, verdicts, explanation.largest_fitting_bytes, where.not_checked()),
        *_wait(cluster, pod, verdicts, explanation, holding, where),
        *_eligible(verdicts, where),
        *_mend(cluster, verdicts, where),
        *_more_replicas(cluster, verdicts, where.not_modeled),
    ]


def allowed(found: Sequence[Suggestions], beyond: str | None) -> list[Suggestions]:
    """``beyond``: as ``quotas.exceeded`` says; None when quotas cannot be read. The user would
    lose a pod that is deleted and then rejected, so nothing is suggested that needs this."""
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
    return [*kept, Suggestions("quota", sentence)]


def blockers(cluster: ClusterState, verdicts: Verdicts, node: NodeExplanation) -> list[Held]:
    """Who holds the devices of a node that keep the pod out, those with the most first."""
    if node.reason is None or not node.reason.evictable:
        return []
    asked = {verdict.ask.resource for verdict in verdicts.asks}
    terms = verdicts.snap.nodes[verdicts.snap.row_of[node.node]].devices
    short = {each.terms.device.uuid for each in node.candidates if each.short_bytes}
    found: dict[str, Held] = {}
    for each in terms:
        if each.device.uuid in short or (not short and each.device.resource in asked):
            for held in holders(cluster, node.node, each):
                found.setdefault(held.uid, held)
    return sorted(found.values(), key=lambda held: -held.charged_bytes)


def but_not_checked(checks: Iterable[str]) -> str:
    """Ends a sentence with the checks that are missing; empty when none is."""
    names = ", ".join(checks)
    return f" (not checked: {names})" if names else ""


def _lower(
    cluster: ClusterState,
    pod: Pod,
    verdicts: Verdicts,
    largest_bytes: int | None,
    not_checked: Sequence[str],
) -> Iterator[Suggestions]:
    lower_bytes = (largest_bytes or 0) >> 20 << 20
    if not lower_bytes:
        return
    text = format_bytes(lower_bytes)
    annotations = {**(pod.metadata.annotations or {}), VRAM: text}
    metadata = msgspec.structs.replace(pod.metadata, annotations=annotations)
    request = cluster.understand(msgspec.structs.replace(pod, metadata=metadata))
    if not isinstance(request, VramRequest):
        return
    nodes = int(fit(request, verdicts.snap, verdicts.rows, verdicts.now_s).fits.sum())
    if nodes:
        now = "that much is free now" if not_checked else "that fits now"
        sentence = f"lower {VRAM} to {text} or less: {now}{but_not_checked(not_checked)}"
        yield Suggestions("lower", sentence, "", None, lower_bytes, nodes, recreates=True)


def _wait(
    cluster: ClusterState,
    pod: Pod,
    verdicts: Verdicts,
    explanation: Explanation,
    holding: Sequence[Sequence[Held]],
    where: Feasible,
) -> Iterator[Suggestions]:
    """For the smallest pod whose end makes room on one of the nearest nodes."""
    could = [
        (held.charged_bytes, node.node, held)
        for node, there in zip(explanation.nearest, holding, strict=True)
        for held in there
        # Less than is lacking makes no room; of a replica nobody can say by its size.
        if held.charged_bytes >= (node.short_bytes or 0)
    ]
    could.sort(key=lambda each: (each[0], each[1], each[2].uid))
    for _, node, held in islice(could, _MOST_TRIED):
        if fits_after_eviction(cluster, pod, node, {held.uid}, verdicts.now_s):
            who, size = f"{held.namespace}/{held.name}", gib(held.charged_bytes)
            since = f" since {held.since[:19]}Z" if held.since else ""
            unchecked = but_not_checked(where.not_checked(verdicts.snap.row_of[node]))
            sentence = (
                f"wait for pod {who}, which holds {size} on node {node}{since}: when it ends there "
                f"is room{unchecked}"
            )
            yield Suggestions("wait", sentence, node, held)
            return


def _eligible(verdicts: Verdicts, where: Feasible) -> Iterator[Suggestions]:
    """Nodes with room from which one obstacle alone keeps the pod."""
    single = {row: found[0] for row, found in where.eligible.obstacles.items() if len(found) == 1}
    rows = np.array(list(single), np.int64)
    fits = fit(verdicts.request, verdicts.snap, rows, verdicts.now_s).fits
    roomy = [row for row, fit_there in zip(rows.tolist(), fits.tolist(), strict=True) if fit_there]
    counts = Counter(single[row] for row in roomy)
    for obstacle, nodes in counts.most_common(_MOST_OBSTACLES):
        first = min(verdicts.snap.nodes[row].name for row in roomy if single[row] == obstacle)
        # kube-scheduler has not looked at these nodes for anything else.
        sentence = f"{_without(obstacle, nodes, first)}{but_not_checked(where.not_modeled)}"
        recreates = obstacle.code != "cordoned"
        node = first if nodes == 1 else ""
        yield Suggestions("eligible", sentence, node, nodes=nodes, recreates=recreates)


def _without(obstacle: Obstacle, nodes: int, first: str) -> str:
    which = f"node {first} has" if nodes == 1 else f"{nodes} nodes, such as {first}, have"
    room = f"{which} room for the pod"
    match obstacle.code:
        case "cordoned":
            return f"uncordon: {room} and {'is' if nodes == 1 else 'are'} cordoned"
        case "taint":
            return f"add a toleration: {room} and taint {obstacle.what}"
        case "selector":
            return f"change nodeSelector {obstacle.what}: {room} and other labels"
        case _:
            return f"change the required node affinity: {room} and other labels"


def _mend(cluster: ClusterState, verdicts: Verdicts, where: Feasible) -> Iterator[Suggestions]:
    """Nodes that a fault alone keeps from taking the pod."""
    faulty = np.flatnonzero(np.isin(verdicts.codes, [CODE_OF[reason] for reason in _FAULTS]))
    found = (i for i in faulty.tolist() if len(list(failing(verdicts, i))) == 1)
    mended = (
        i
        for i in islice(found, _MOST_TRIED)
        if _fits_when_mended(cluster, verdicts, verdicts.snap.nodes[int(verdicts.rows[i])].name)
    )
    for i in islice(mended, _MOST_NAMED):
        row = int(verdicts.rows[i])
        node, (fault,) = verdicts.snap.nodes[row], failing(verdicts, i)
        what = fault.sentence
        if fault is Reason.UNHEALTHY_DEVICE:
            details = (
                f"{t.device.uuid}: {t.health_detail}" for t in node.devices if t.health_detail
            )
            what += f" ({next(details)})"
        sentence = (
            f"repair node {node.name}: it has room for the pod, but: {what}"
            f"{but_not_checked(where.not_checked(row))}"
        )
        yield Suggestions("mend", sentence, node.name)


def _fits_when_mended(cluster: ClusterState, verdicts: Verdicts, name: str) -> bool:
    simulation = Simulation(cluster, verdicts.snap, verdicts.now_s)
    try:
        simulation.mend(name)
    except KeyError:
        return False
    return _fits(verdicts, simulation, name)


def _fits(verdicts: Verdicts, simulation: Simulation, name: str) -> bool:
    """Whether the node of this name takes the pod in the trial."""
    snap = simulation.snapshot()
    row = np.array([snap.row_of[name]], np.int64)
    return bool(fit(verdicts.request, snap, row, verdicts.now_s).fits[0])


def _more_replicas(
    cluster: ClusterState, verdicts: Verdicts, not_checked: Sequence[str]
) -> Iterator[Suggestions]:
    """Nodes that have no free replica, and that take the pod with one more replica on each shared
    device."""
    lacks = np.flatnonzero(verdicts.codes == CODE_OF[Reason.NO_REPLICA])
    # The nodes with the most headroom first: they are the likeliest to take it.
    lacks = lacks[
        np.argsort(-verdicts.snap.node_headroom_bytes[verdicts.rows[lacks]], kind="stable")
    ]
    names = [verdicts.snap.nodes[int(verdicts.rows[i])].name for i in lacks[:_MOST_TRIED]]
    helped = sorted(name for name in names if _fits_with_another_replica(cluster, verdicts, name))
    if helped:
        nodes, first = len(helped), helped[0]
        which = f"node {first} has" if nodes == 1 else f"{nodes} nodes, such as {first}, have"
        sentence = (
            f"{which} the memory and no free replica: raise the replicas that the device plugin "
            f"advertises there{but_not_checked(not_checked)}"
        )
        yield Suggestions("replicas", sentence, first if nodes == 1 else "", nodes=nodes)


def _fits_with_another_replica(cluster: ClusterState, verdicts: Verdicts, name: str) -> bool:
    terms = verdicts.snap.nodes[verdicts.snap.row_of[name]]
    most = max((d.device.replicas.total for d in terms.devices if d.shared), default=0)
    if not 0 < most < MAX_REPLICAS:
        return False
    simulation = Simulation(cluster, verdicts.snap, verdicts.now_s)
    try:
        simulation.set_replicas(name, most + 1)
    except (KeyError, ValueError):
        return False
    return _fits(verdicts, simulation, name)
