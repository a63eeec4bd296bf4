"""Checks the invariants of a cluster state, using only its objects.

The state is updated incrementally. The check derives everything again from the objects and weighs
each node again. If the state has missed a change, or has not marked a node as dirty, the results
differ.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from headroom.contract.annotations import MAX_SM
from headroom.core.cluster.changes import Event
from headroom.core.cluster.cluster_parts import Parts
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.object_cache import ObjectCache
from headroom.core.placement.snapshot import NodeTerms

#: The nodes of larger states are not weighed again, because that takes a second for 5,000 nodes.
MOST_NODES = 500
#: The last states that changed since the last call of ``violations``. A property test creates a
#: state for each example, and only the last ``_MOST_STATES`` states are checked.
_changed: dict[int, ClusterWriter] = {}
_MOST_STATES = 8


def watch_states() -> None:
    """Record every state that changes from now on."""
    steps = ClusterWriter.steps

    def watched(self: ClusterWriter, events: Iterable[Event]) -> Iterator[None]:
        _changed[id(self)] = self
        if len(_changed) > _MOST_STATES:
            del _changed[next(iter(_changed))]
        return steps(self, events)

    ClusterWriter.steps = watched  # type: ignore[method-assign]


def violations() -> list[str]:
    """Return the violated invariants of the states that changed since the last call."""
    states = list(_changed.values())
    _changed.clear()
    return [found for state in states for found in violated(state)]


def violated(writer: ClusterWriter) -> Iterator[str]:
    """Yield a sentence for each violated invariant."""
    parts = writer.parts
    yield from _shown(writer)
    yield from _indexes(parts.objects)
    yield from _reservations(writer)
    yield from _members(parts)
    if len(parts.objects.nodes) <= MOST_NODES:
        yield from _terms(writer)


def _shown(writer: ClusterWriter) -> Iterator[str]:
    """Check that readers and the writer share the same parts."""
    parts = vars(writer.parts)
    for name, part in vars(writer.cluster).items():
        if not name.startswith("_") and name in parts and part is not parts[name]:
            yield f"the cluster shows another {name} than the writer changes"


def _indexes(objects: ObjectCache) -> Iterator[str]:
    pods, on = objects.pods, defaultdict(set)
    for uid, pod in pods.items():
        if pod.node:
            on[pod.node].add(uid)
    unbound = {uid for uid, pod in pods.items() if not pod.node and not pod.ended}
    least = {name: min(pod.priority for pod in on) for name, on in objects._pods_on.items() if on}
    for name, held, derived in (
        ("unbound", set(objects.unbound), unbound),
        ("uids_on", {name: set(uids) for name, uids in objects.uids_on.items()}, dict(on)),
        ("lowest_priorities", objects.lowest_priorities, least),
        (
            "with_max_sm",
            objects.with_max_sm,
            {uid for uid in unbound if pods[uid].annotation(MAX_SM) is not None},
        ),
        (
            "cordoned",
            objects.cordoned,
            {name for name, n in objects.nodes.items() if n.spec and n.spec.unschedulable},
        ),
    ):
        if held != derived:
            yield f"{name} is {held}, and by the objects {derived}"
    for (namespace, name), uid in objects._uid_of.items():
        pod = pods.get(uid)
        if pod is None or (pod.metadata.namespace, pod.metadata.name) != (namespace, name):
            yield f"{namespace}/{name} leads to {uid}, which is another pod"


def _reservations(writer: ClusterWriter) -> Iterator[str]:
    """Check the values that are derived from reservations, and check that no bound pod has a chosen
    node.
    """
    parts, objects = writer.parts, writer.parts.objects
    gpunodes = {n: g for n, g in objects.gpunodes.items() if n not in writer._incomplete}
    starting = {
        name
        for name, gpunode in gpunodes.items()
        if any(each.is_starting for each in gpunode.spec.reservations.values())
    }
    if (held := {*parts.starting.nodes()} - writer._incomplete) != starting:
        yield f"starting is {held}, and by the objects {starting}"
    for uid, names in parts.unfinished_binds._nodes.items():
        for name in names - writer._incomplete:
            if uid not in objects.reserved(name):
                yield f"unfinished_binds has {uid} on {name}, which has no reservation of it"
    for uid in parts.calls.assumed._assumed:
        pod = objects.pods.get(uid)
        if pod is not None and (pod.node or pod.ended):
            yield f"{uid} is bound or has ended, and its bind is still assumed"


def _members(parts: Parts) -> Iterator[str]:
    """Check that the table has a row for each node, except nodes that wait to be weighed or could
    not be weighed.
    """
    known = {*parts.objects.nodes, *parts.objects.gpunodes}
    rows = {name for name in parts.table._row_of if parts.table.get(name) is not None}
    waiting = {*parts.queue._dirty, *parts.queue._failed}
    if parts.queue.unlisted:
        return
    if missing := known - rows - waiting:
        yield f"nodes without a row: {sorted(missing)}"
    if extra := rows - known - waiting:
        yield f"rows of nodes that are gone: {sorted(extra)}"


def _terms(writer: ClusterWriter) -> Iterator[str]:
    """Check that weighing a node again yields equal terms."""
    parts, cluster = writer.parts, writer.cluster
    waiting = {*parts.queue._dirty, *parts.queue._failed}
    for name in parts.table._row_of:
        held = parts.table.get(name)
        if held is None or name in waiting or parts.queue.unlisted:
            continue
        pods = [parts.objects.pods[uid] for uid in parts.objects.uids_on.get(name, ())]
        running = {pod.metadata.uid for pod in pods if not pod.ended}
        if (kept := {pod.metadata.uid for pod in cluster.pods_on(name)}) != running:
            yield f"{name}: pods_on has {kept}, and by the objects {running}"
        again = cluster.terms_of(
            name, cluster.gpunode(name), assumed=cluster.holds.binding_to(name)
        )
        if (before := _memory(held)) != (after := _memory(again)):
            yield f"{name} has {before}, and weighed again {after}"


def _memory(terms: NodeTerms) -> object:
    return [
        (d.device.uuid, d.reservation_bytes, d.unconfirmed_bytes, d.headroom_bytes)
        for d in terms.devices
    ]
