"""The commands that change a node: ``cordon`` and ``uncordon``.

They read the debug API like all commands, and write with the credentials of the kubeconfig. If the
debug API cannot be reached, they accept only whole UUIDs and show no preview.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from headroom.contract.annotations import CORDON
from headroom.contract.commands import command
from headroom.kubectl.cluster_changes import Cluster, NodeRead, annotate, nodes_listed
from headroom.kubectl.cordon import (
    Gpu,
    annotated,
    annotation,
    gpus_of,
    preview,
    selected,
    whole_uuids,
)
from headroom.kubectl.debug_api_client import (
    BAD_INPUT,
    NOT_THERE,
    UNREACHABLE,
    CommandError,
    DebugApi,
)
from headroom.kubectl.eviction import Clock, Held, evicted, held, why_kept
from headroom.kubectl.options import Options, timeout_seconds
from headroom.kubectl.output import show, show_lines

CLOCK = Clock(time.monotonic, time.sleep)

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="Name of the node.")]
Given = Annotated[
    list[str],
    typer.Argument(
        metavar="GPU", help="UUID of a GPU, its unique start, or the index of a GPU of the node."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would happen; change nothing.")]


def cordon(
    context: typer.Context,
    node: NodeName,
    gpus: Given,
    dry_run: DryRun = False,
    evict: Annotated[
        bool, typer.Option("--evict", help="Also evict the pods on the GPUs, as kubectl drain.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --evict: also evict pods without a controller.")
    ] = False,
    timeout: Annotated[
        str, typer.Option(help="With --evict: time until all pods must have ended.")
    ] = "5m",
) -> None:
    """Stop new pods from using GPUs of a node, after a preview of what is lost.

    With --evict, disruption budgets are respected, and pods of DaemonSets and mirror pods stay. The
    exit status is 1 if a pod stays. Your account must be allowed to get and patch nodes, and for
    --evict also to get pods and to create pods/eviction.
    """
    if force and not evict:
        raise CommandError("--force needs --evict", BAD_INPUT)
    timeout_s = timeout_seconds(timeout)
    options: Options = context.obj
    cluster, debug = Cluster(options.kubeconfig, options.context), _Debug(options, node)
    if debug.unreachable and evict:
        raise CommandError(
            f"--evict needs the debug API, which lists the pods of a GPU: {debug.unreachable}",
            UNREACHABLE,
        )
    read = cluster.node(node)
    before = annotated(node, read.annotations)
    if debug.unreachable:
        chosen = whole_uuids(gpus, debug.unreachable)
        _note(f"no preview: {debug.unreachable}")
    else:
        chosen = selected(node, debug.gpus(), gpus)
    new = [gpu for gpu in chosen if not {gpu.uuid, gpu.parent} & before]
    for gpu in chosen:
        if gpu not in new:
            show_lines([f"node {node}: {gpu} is already cordoned"])
    if new and not debug.unreachable:
        show_lines(preview(debug.body, new, read.annotations, debug.steering_obstacle, evict))

    def added(found: NodeRead) -> str | None:
        return annotation(annotated(node, found.annotations) | {gpu.uuid for gpu in new})

    if new and not dry_run:
        annotate(cluster, node, CORDON, added)
    for gpu in new:
        done = "would be cordoned (dry run)" if dry_run else "cordoned"
        show_lines([f"node {node}: {gpu} {done}"])
    if evict and _evict(cluster, debug, chosen, force, timeout_s, dry_run):
        raise typer.Exit(NOT_THERE)


def uncordon(context: typer.Context, node: NodeName, gpus: Given, dry_run: DryRun = False) -> None:
    """Let GPUs of a node take pods again.

    Your account must be allowed to get and patch nodes.
    """
    options: Options = context.obj
    cluster, debug = Cluster(options.kubeconfig, options.context), _Debug(options, node)
    before = annotated(node, cluster.node(node).annotations)
    if debug.unreachable:
        _note(f"only whole UUIDs can be given: {debug.unreachable}")
        known = whole_uuids([each for each in gpus if not _starts(before, each)], debug.unreachable)
    else:
        known = debug.gpus()
    # The annotation may still contain a GPU that was removed from the node.
    known += [Gpu(uuid) for uuid in sorted(before - {gpu.uuid for gpu in known})]
    chosen = selected(node, known, gpus)
    gone_of = {gpu: {gpu.uuid, *(d["uuid"] for d in gpu.devices)} & before for gpu in chosen}
    for gpu in chosen:
        if gpu.parent in before:
            raise CommandError(
                f"{gpu} is cordoned with its whole GPU, {gpu.parent}. To uncordon that GPU: "
                + command("kubectl", "headroom", "uncordon", node, gpu.parent),
                BAD_INPUT,
            )
    gone = frozenset[str]().union(*gone_of.values())

    def without(found: NodeRead) -> str | None:
        return annotation(annotated(node, found.annotations) - gone)

    if gone and not dry_run:
        annotate(cluster, node, CORDON, without)
    done = "would be uncordoned (dry run)" if dry_run else "uncordoned"
    for gpu, uuids in gone_of.items():
        show_lines([f"node {node}: {gpu} {done if uuids else 'is not cordoned'}"])


class _Debug:
    """The node as the debug API describes it, or the reason why the debug API cannot be reached."""

    def __init__(self, options: Options, node: str) -> None:
        """Raises ``CommandError`` if the debug API has no such node."""
        self.node = node
        self.unreachable = ""
        self.steering_obstacle: str | None = None
        try:
            self.api: DebugApi = options.api()
            self.body = self.read()
        except CommandError as err:
            if err.exit_code != UNREACHABLE:
                raise
            self.unreachable = str(err)

    def read(self) -> Any:
        try:
            body = self.api.get("nodes", self.node)
            self.steering_obstacle = body.get("steering_obstacle")
            return body["node"]
        except CommandError as err:
            if err.exit_code != NOT_THERE:
                raise
            names = (each["name"] for each in self.api.all_pages("nodes")["nodes"])
            raise CommandError(
                f"Headroom has no node {self.node}. {nodes_listed(names)}", BAD_INPUT
            ) from err

    def gpus(self) -> list[Gpu]:
        """Return everything that can be cordoned, including the physical GPUs of MIG devices."""
        first = {
            each["driver_index"]: each for each in self.body["devices"] if each["kind"] == "mig"
        }
        parent_of = {
            index: self.api.get("nodes", self.node, "devices", each["uuid"])["mig_parent"]
            for index, each in first.items()
        }
        return gpus_of(
            self.body,
            {
                each["uuid"]: parent_of[each["driver_index"]]
                for each in self.body["devices"]
                if each["kind"] == "mig" and parent_of[each["driver_index"]]
            },
        )

    def held(self, chosen: Sequence[Gpu]) -> dict[str, Held]:
        """Read the pods on these GPUs. Raises ``CommandError`` if any of them is hidden."""
        uuids = {device["uuid"] for gpu in chosen for device in gpu.devices}
        devices = [each for each in self.read()["devices"] if each["uuid"] in uuids]
        if any(each["hidden_holders"] for each in devices):
            raise CommandError(
                f"pods on the GPUs of node {self.node} are hidden from you, so they are not "
                "evicted: you need the ClusterRole headroom-viewer",
                UNREACHABLE,
            )
        return held(devices)


def _evict(
    cluster: Cluster,
    debug: _Debug,
    chosen: Sequence[Gpu],
    force: bool,
    timeout_s: float,
    dry_run: bool,
) -> bool:
    """Evict the pods on the GPUs, and print a line for each. Return whether any pod stayed."""
    if dry_run:
        show_lines(_would_evict(cluster, debug.held(chosen), force))
        return False
    stayed = 0
    for fate in evicted(lambda: debug.held(chosen), cluster, force, timeout_s, CLOCK):
        show_lines([fate.line])
        sys.stdout.flush()
        stayed += fate.stayed
    return bool(stayed)


def _would_evict(cluster: Cluster, found: dict[str, Held], force: bool) -> Iterator[str]:
    for uid, pod in found.items():
        read = cluster.pod(pod.namespace, pod.name)
        if read is None or read.uid != uid or read.ends:
            yield f"{pod}: is already terminating"
        elif why := why_kept(read, force):
            yield f"{pod}: would stay: {why}"
        else:
            unless = "" if pod.observed else ", if a report shows it on this GPU"
            yield f"{pod}: would be evicted{unless}"


def _starts(uuids: frozenset[str], word: str) -> bool:
    return any(uuid.startswith(word) for uuid in uuids)


def _note(text: str) -> None:
    show(text, error=True)
