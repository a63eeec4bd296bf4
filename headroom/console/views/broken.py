"""Finds what is broken: nodes that take no pods, unhealthy devices, and unreadable inputs."""

from collections.abc import Iterator

import numpy as np

from headroom.console.responses import counted
from headroom.console.view import View
from headroom.console.view_context import Context
from headroom.console.views.decisions import unread_extenders
from headroom.contract.commands import command
from headroom.contract.device_names import noun
from headroom.contract.reasons import Reason
from headroom.core.placement.device_reading import mode_command
from headroom.core.placement.snapshot import Snapshot

#: Maximum number of nodes named in one entry.
MOST_NAMED = 3

_USUAL = "kubectl headroom doctor"


def _agent(node: str) -> str:
    selector = "--field-selector", f"spec.nodeName={node}"
    return command("kubectl", "-n", "headroom-system", "get", "pods", "-o", "wide", *selector)


def _describe(node: str) -> str:
    return command("kubectl", "describe", "node", node)


#: Reason -> function that returns a command to inspect the first of the nodes.
_COMMANDS = {
    Reason.NO_REPORT: _agent,
    Reason.LABELS_INCOMPLETE: _agent,
    Reason.STALE_REPORT: _agent,
    Reason.BAD_NODE_ANNOTATION: _describe,
    Reason.MIG_FAILED: _describe,
    Reason.MIG_INVALID: _describe,
}
_LOG = "kubectl -n headroom-system logs -l app.kubernetes.io/component=console --tail 20"
#: Reasons that disappear by themselves within minutes.
_PASSING = {Reason.NOT_INITIALISED, Reason.EVICTED_RECENTLY, Reason.MIG_CHANGING}


class BrokenView(View):
    kind: str
    """nodes, device, input or settings."""
    message: str
    fix: str
    """The action that fixes it, or a command that shows more."""
    node: str | None = None
    """The affected node, or the first of several; null if there is none."""
    gpu: str | None = None
    """Name of the device, as in the list of nodes."""


def broken(context: Context, snap: Snapshot) -> list[BrokenView]:
    """Return everything that is broken: inputs and settings, then nodes, then devices."""
    return [*_inputs(context), *_nodes(context, snap), *_devices(snap)]


def _inputs(context: Context) -> Iterator[BrokenView]:
    for line in context.settings().rejected:
        yield BrokenView(
            kind="settings",
            message=f"the settings file is not valid; the previous settings stay in use: {line}",
            fix="headroom config check FILE",
        )
    if reason := context.unready():
        yield BrokenView(kind="input", message=reason, fix=_LOG)
    for source in context.watches():
        if source.unreadable:
            objects = f"{source.unreadable} {source.kind} cannot be read"
            logged = "the log of the console names them: object_unreadable"
            yield BrokenView(kind="input", message=objects, fix=logged)
    for each in unread_extenders(context):
        yield BrokenView(
            kind="input",
            message=f"the journal of extender {each.peer} cannot be read: {each.message}",
            fix="kubectl -n headroom-system get pods -l app.kubernetes.io/component=extender",
        )


def _nodes(context: Context, snap: Snapshot) -> Iterator[BrokenView]:
    closed: dict[Reason, list[str]] = {}
    stale = snap.fresh_until_s < context.monotonic_s()
    for row in np.flatnonzero((snap.node_reason > 0) | stale).tolist():
        node = snap.nodes[row]
        reason = node.reason or Reason.STALE_REPORT
        if reason not in _PASSING and node.equipped:
            closed.setdefault(reason, []).append(node.name)
    for reason, names in sorted(closed.items(), key=lambda each: -len(each[1])):
        named = ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
        yield BrokenView(
            kind="nodes",
            message=f"{counted(len(names), 'node')}: {reason.sentence} ({named})",
            fix=_COMMANDS[reason](names[0]) if reason in _COMMANDS else _USUAL,
            node=names[0],
        )


def _devices(snap: Snapshot) -> Iterator[BrokenView]:
    columns = snap.columns
    rows, slots = np.nonzero((columns.health_issue > 0) & (columns.replicas >= 0))
    for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
        node = snap.nodes[row]
        terms = node.devices[slot]
        if terms.unhealthy is not None:
            what = terms.health_detail or terms.unhealthy.sentence
            device = terms.device
            which = device.index if device.index >= 0 else device.uuid
            state = "is unhealthy"
            cordon = command("kubectl", "headroom", "cordon", node.name, str(which), "--evict")
            fix = f"{cordon}, then reset or replace it"
            if terms.unhealthy is Reason.COMPUTE_MODE:
                state, fix = "takes no pods", f"on the node: {mode_command(device)}"
            yield BrokenView(
                kind="device",
                message=f"{noun(device.name)} of {node.name} {state}: {what}",
                fix=fix,
                node=node.name,
                gpu=device.name,
            )
