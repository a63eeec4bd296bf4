"""Checks the invariants of a cluster's state, from its objects alone.

The state is maintained change by change. Here everything is derived again from the objects, and
each node is weighed again. So a change that was not passed on, or a node that was not marked dirty,
appears as a difference.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from headroom.contract.annotations import MAX_SM
from headroom.core.cluster.changes import Event
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.snapshot import NodeTerms

#: States with more nodes are not weighed again, because that takes a second for 5,000 nodes.
MOST_NODES = 500
#: The last states changed since ``violations`` was called, by ID. A property test makes a state for
#: each example, and only the last states are checked.
_changed: dict[int, ClusterWriter] = {}
_MOST_STATES = 8


def watch_states() -> None:
    """Record each state that is changed from now on."""
    steps = ClusterWriter.steps

    def watched(self: ClusterWriter, events: Iterable[Event]) -> Iterator[None]:
        _changed[id(self)] = self
        if len(_changed) > _MOST_STATES:
            del _changed[next(iter(_changed))]
        return steps(self, events)

    ClusterWriter.steps = watched  # type: ignore[method-assign]


def violations() -> list[str]:
    """Return the violated invariants of the states that were changed since the last call."""
    states = list(_changed.values())
    _changed.clear()
    return [found for state in states for found in violated(state)]


def violated(state: Cluster) -> Iterator[str]:
    """Yield a sentence for each violated invariant of the state."""
    yield from _indexes(state)
    yield from _members(state)
    if len(state.nodes()) <= MOST_NODES:
        yield from _terms(state)


def _indexes(state: Cluster) -> Iterator[str]:
    objects = state._objects
    pods, on = objects.pods, defaultdict(set)
    for uid, pod in pods.items():
        if pod.node:
            on[pod.node].add(uid)
    unbound = {uid for uid, pod in pods.items() if not pod.node and not pod.ended}
    for name, held, derived in (
        ("unbound", set(objects.unbound), unbound),
        ("uids_on", {name: set(uids) for name, uids in objects.uids_on.items()}, dict(on)),
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


def _members(state: Cluster) -> Iterator[str]:
    """Check that the table has a row for each node, unless the node waits to be weighed or its
    weighing failed."""
    known = {*state._objects.nodes, *state._objects.gpunodes}
    rows = {name for name in state._table._row_of if state._table.get(name) is not None}
    waiting = {*state._queue._dirty, *state._queue._failed}
    if state._queue.unlisted:
        return
    if missing := known - rows - waiting:
        yield f"nodes without a row: {sorted(missing)}"
    if extra := rows - known - waiting:
        yield f"rows of nodes that are gone: {sorted(extra)}"


def _terms(state: Cluster) -> Iterator[str]:
    """Check that weighing a node again gives equal terms."""
    waiting = {*state._queue._dirty, *state._queue._failed}
    for name in state._table._row_of:
        held = state._table.get(name)
        if held is None or name in waiting or state._queue.unlisted:
            continue
        pods = [state._objects.pods[uid] for uid in state._objects.uids_on.get(name, ())]
        running = {pod.metadata.uid for pod in pods if not pod.ended}
        if (kept := {pod.metadata.uid for pod in state.pods_on(name)}) != running:
            yield f"{name}: pods_on has {kept}, and by the objects {running}"
        again = state._weigher.terms_of(
            name, state.gpunode(name), assumed=state.holds.binding_to(name)
        )
        if (before := _memory(held)) != (after := _memory(again)):
            yield f"{name} has {before}, and weighed again {after}"


def _memory(terms: NodeTerms) -> object:
    return [
        (d.device.uuid, d.reservation_bytes, d.unconfirmed_bytes, d.headroom_bytes)
        for d in terms.devices
    ]
