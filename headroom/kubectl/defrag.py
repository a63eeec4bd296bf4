"""``kubectl headroom defrag``: names pods to move so that a waiting pod fits, or a node is free.

With ``--apply``, it evicts them one at a time with the user's own credentials. Before each
eviction, it asks the debug API again, because the cluster may have changed. After each eviction,
the successor must land on one of the nodes on which it fitted in the simulation. If it does not,
the command stops."""

import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import typer

from headroom.contract.commands import command
from headroom.contract.quantity import gib
from headroom.kubectl.cluster_changes import Cluster, Created, NodeRead, Outcome, PodRead
from headroom.kubectl.debug_api_client import BAD_INPUT, NOT_THERE, CommandError
from headroom.kubectl.eviction import EVERY_S, Clock
from headroom.kubectl.options import DataFormat, Namespace, Options, timeout_seconds
from headroom.kubectl.output import not_checked, print_data, show_lines
from headroom.kubectl.top import counted
from headroom.kubectl.workload import pod_key

Body = Mapping[str, Any]
CLOCK = Clock(time.monotonic, time.sleep)
#: Maximum number of nodes named in a line.
_MOST_NAMES = 5


def defrag(
    context: typer.Context,
    pod: Annotated[
        str | None,
        typer.Argument(
            help="Name of the waiting pod, namespace/name, or a workload: deploy/NAME; default:"
            " every waiting pod."
        ),
    ] = None,
    namespace: Namespace = None,
    free_node: Annotated[
        bool, typer.Option("--free-node", help="Free the GPUs of a node instead.")
    ] = False,
    node: Annotated[str | None, typer.Option(help="Move only pods of this node.")] = None,
    apply: Annotated[
        bool,
        typer.Option(
            "--apply",
            help="Evict the pods one at a time. Stop if a pod gets another node than simulated.",
        ),
    ] = False,
    timeout: Annotated[
        str, typer.Option(help="With --apply: time until each eviction has its effect.")
    ] = "5m",
    output: DataFormat = None,
) -> None:
    """Find the fewest pods to move so that a waiting pod fits, or the GPUs of a node are free.

    Only pods whose controller creates them again are moved, and only if they fit on at least two
    other nodes. Nothing is changed without --apply. The exit status is 1 if no moves are found for
    POD or with --free-node, or if --apply stops early. With only --output, it is 0.
    """
    if pod is not None and free_node:
        raise CommandError("--free-node needs no pod: remove one of them", BAD_INPUT)
    if apply and pod is None and not free_node:
        raise CommandError(
            "--apply needs the name of a waiting pod, or --free-node. "
            "Example: kubectl headroom defrag trainer-0 --apply",
            BAD_INPUT,
        )
    timeout_s = timeout_seconds(timeout)
    options: Options = context.obj
    api = options.api()
    asked = None if pod is None else pod_key(options, api, pod, namespace)

    def ask(on: str | None) -> Body:
        body: Body = api.get("defrag", pod=asked, free_node=free_node or None, node=on)
        return body

    body = ask(node)
    if print_data(body, output) and not apply:
        return
    if output is None:
        show_lines(lines(body, apply))
    if not apply:
        if pod is not None or free_node:
            raise typer.Exit(NOT_THERE if body["answers"][0]["outcome"] == "none" else 0)
        return
    cluster = Cluster(options.kubeconfig, options.context)
    for step in applied(body["answers"][0], ask, cluster, timeout_s, CLOCK):
        show_lines([step.line])
        sys.stdout.flush()
        if step.stops:
            raise typer.Exit(NOT_THERE)


def lines(body: Body, applies: bool = False) -> Iterator[str]:
    """Yield the text of an answer. With ``applies``, leave out the command that applies it."""
    if not body["answers"]:
        yield "no pod waits for a GPU" if not body["unanswered"] else "no pod was examined"
    for answer in body["answers"]:
        yield from _answer(answer)
        if answer["outcome"] == "move" and not applies:
            yield f"  to move {'it' if len(answer['moves']) == 1 else 'them'}: {_command(answer)}"
    if body["cut_short"]:
        missing = f"; {counted(body['unanswered'], 'pod')} not examined" * bool(body["unanswered"])
        yield (
            f"The search reached its limit after {counted(body['examined_nodes'], 'node')}"
            f"{missing}. Fewer moves may be possible."
        )
    elif body["unanswered"]:
        yield f"{counted(body['unanswered'], 'more pod')} not examined: name the pod"
    yield not_checked(body)


def _answer(answer: Body) -> Iterator[str]:
    if answer["pod"] is None:
        yield answer["message"]
    else:
        alike = answer["alike"] - 1
        more = f" (and {counted(alike, 'equal pod')})" if alike else ""
        yield f"pod {answer['pod']}{more}: {answer['message']}"
    for number, move in enumerate(answer["moves"], 1):
        yield (
            f"  {number}. move {_name(move)} of {move['owner_kind']} {move['owner_name']}, "
            f"{gib(move['reserved_bytes'])}: it fits on {counted(move['places'], 'other node')}: "
            f"{_named(move['nodes'], move['places'])}"
        )
    if answer["outcome"] == "move":
        devices, gain = answer["devices"], gib(answer["gain_bytes"])
        which = devices[0] if len(devices) == 1 else f"{len(devices)} GPUs"
        if answer["pod"] is None:
            yield f"  this frees {which}, with {gain} headroom"
        else:
            yield f"  the pod gets {gain} on {'' if len(devices) == 1 else 'one of '}{which}"
    if answer["outcome"] == "none":
        for stay in answer["stay"]:
            yield f"  not moved: {counted(stay['pods'], 'pod')} with {stay['message']}"


def _command(answer: Body) -> str:
    goal = [answer["pod"]] if answer["pod"] else ["--free-node", "--node", answer["node"]]
    return command("kubectl", "headroom", "defrag", *goal, "--apply")


def _name(move: Body) -> str:
    return f"{move['namespace']}/{move['name']}"


def _named(nodes: list[str], places: int) -> str:
    more = places - min(len(nodes), _MOST_NAMES)
    return ", ".join(nodes[:_MOST_NAMES]) + (f" and {more} more" if more else "")


class Api(Protocol):
    """The calls of the API server that moves need."""

    def node(self, name: str) -> NodeRead: ...

    def set_cordon(self, name: str, cordoned: bool) -> None: ...

    def pod(self, namespace: str, name: str) -> PodRead | None: ...

    def created_by(self, namespace: str, controller_uid: str) -> list[Created]: ...

    def evict(self, namespace: str, name: str, uid: str) -> tuple[Outcome, str]: ...


@dataclass(frozen=True, slots=True)
class Step:
    """A line about what happened, and whether the command stops without success."""

    line: str
    stops: bool = False


def applied(
    answer: Body, ask: Callable[[str], Body], api: Api, timeout_s: float, clock: Clock
) -> Iterator[Step]:
    """Move the pods of the answer one at a time, and yield each step.

    ``ask`` returns the newest answer about moves from a node. The node is cordoned meanwhile, which
    keeps successors from coming back to it. A node that was freed stays cordoned. Raises
    ``CommandError``.
    """
    if answer["outcome"] != "move":
        yield Step(_said(answer), answer["outcome"] == "none")
        return
    node, for_pod = answer["node"], answer["pod"] is not None
    ours = not api.node(node).cordoned
    if ours:
        api.set_cordon(node, True)
        yield Step(f"node {node}: cordoned, so that no pod comes back")
    try:
        result = yield from _moves(answer, ask, api, timeout_s, clock)
    except BaseException:  # also Ctrl-C
        if ours:
            api.set_cordon(node, False)
        raise
    if ours and (for_pod or result.stops):
        api.set_cordon(node, False)
        yield Step(f"node {node}: uncordoned")
    if result.stops or not for_pod:
        yield result
    if result.stops:
        return
    uncordon = command("kubectl", "uncordon", node)
    if not for_pod:
        yield Step(f"node {node} stays cordoned. To let pods in: {uncordon}")
        return
    if not ours:
        yield Step(f"stopped: node {node} was cordoned before: {uncordon}", True)
        return
    deadline_s = clock.monotonic_s() + timeout_s
    while (answer := ask(node)["answers"][0])["outcome"] != "bound":
        if (left_s := deadline_s - clock.monotonic_s()) <= 0:
            yield Step(f"stopped: after {timeout_s:g} s, {_said(answer)}", True)
            return
        clock.sleep(min(EVERY_S, left_s))
    yield Step(_said(answer))


def _moves(
    answer: Body, ask: Callable[[str], Body], api: Api, timeout_s: float, clock: Clock
) -> Generator[Step, None, Step]:
    """Move pods until no move remains. Return the last step, which may stop the command."""
    node = answer["node"]
    #: Number of moves that the user has seen and that remain.
    remaining = len(answer["moves"])
    evicted: set[str] = set()
    deadline_s = clock.monotonic_s() + timeout_s
    while answer["outcome"] in ("move", "soon"):
        moves = answer["moves"]
        if moves and not evicted & {move["uid"] for move in moves}:
            if len(moves) > remaining:
                return Step(
                    f"stopped: the cluster has changed: {counted(len(moves), 'move')} would be "
                    f"needed now, but only {remaining} remained; run the command again",
                    True,
                )
            remaining, evicted = len(moves) - 1, evicted | {moves[0]["uid"]}
            step = yield from _moved(moves[0], node, api, timeout_s, clock)
            if step.stops:
                return step
            yield step
            deadline_s = clock.monotonic_s() + timeout_s
        elif (left_s := deadline_s - clock.monotonic_s()) > 0:
            # Wait until the kubelet has ended the pod and the debug API shows this.
            clock.sleep(min(EVERY_S, left_s))
        else:
            return Step(f"stopped: after {timeout_s:g} s, {_said(answer)}", True)
        answer = ask(node)["answers"][0]
    if answer["outcome"] == "none":
        return Step(f"stopped: {_said(answer)}", True)
    return Step(_said(answer))


def _said(answer: Body) -> str:
    message: str = answer["message"]
    return message if answer["pod"] is None else f"pod {answer['pod']}: {message}"


def _moved(
    move: Body, node: str, api: Api, timeout_s: float, clock: Clock
) -> Generator[Step, None, Step]:
    """Evict one pod, and wait until its successor is bound. Return the step that names its node."""
    deadline_s = clock.monotonic_s() + timeout_s
    namespace, name, uid = move["namespace"], move["name"], move["uid"]
    read = api.pod(namespace, name)
    if read is None or read.uid != uid or read.ends:
        return Step(f"pod {_name(move)}: is already terminating, so it is not evicted")
    before = {each.uid for each in api.created_by(namespace, read.controller_uid)}
    waits_for = ""
    while True:
        outcome, why = api.evict(namespace, name, uid)
        left_s = deadline_s - clock.monotonic_s()
        if outcome is Outcome.FAILED or (outcome is Outcome.LATER and left_s <= 0):
            return Step(f"stopped: pod {_name(move)} cannot be evicted: {why}", True)
        if outcome is not Outcome.LATER:
            break
        if why != waits_for:
            waits_for = why
            yield Step(f"pod {_name(move)}: waits: {why}")
        clock.sleep(min(EVERY_S, left_s))
    yield Step(f"pod {_name(move)}: evicted from node {node}")
    while True:
        found = api.created_by(namespace, read.controller_uid)
        successors = [each for each in found if each.uid not in before]
        bound = next((each for each in successors if each.node), None)
        left_s = deadline_s - clock.monotonic_s()
        if bound is not None or left_s <= 0:
            return _landed(move, bound, successors, timeout_s)
        clock.sleep(min(EVERY_S, left_s))


def _landed(
    move: Body, bound: Created | None, successors: Sequence[Created], timeout_s: float
) -> Step:
    """Return the result of an eviction. It stops the command if the successor is on a node that was
    not simulated."""
    namespace, places = move["namespace"], counted(move["places"], "simulated node")
    if bound is not None:
        landed = f"{namespace}/{bound.name} is bound to node {bound.node}"
        if bound.node in move["nodes"]:
            return Step(f"pod {_name(move)}: its successor {landed}, one of {places}")
        named = _named(move["nodes"], move["places"])
        return Step(f"stopped: successor {landed}, which is not one of {places}: {named}", True)
    if not successors:
        owner = f"{move['owner_kind']} {namespace}/{move['owner_name']}"
        return Step(f"stopped: {owner} has created no successor within {timeout_s:g} s", True)
    waits = f"{namespace}/{successors[0].name}"
    return Step(
        f"stopped: successor {waits} is not bound after {timeout_s:g} s. "
        f"To see why: {command('kubectl', 'headroom', 'why', waits)}",
        True,
    )
