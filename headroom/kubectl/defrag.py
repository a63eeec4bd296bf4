"""``kubectl headroom defrag``: which pods to move so that a waiting pod fits, or a node is free.

With ``--apply`` it evicts them one at a time with the user's own credentials. Before each eviction
the debug API is asked again, because the cluster may have changed. After each, the successor must
land on one of the nodes on which it fitted in the simulation; otherwise the command stops.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import typer

from contract.quantity import gib
from headroom.kubectl.cluster import Cluster, Created, Outcome, PodRead
from headroom.kubectl.debug_api_client import BAD_INPUT, NOT_THERE, CommandError
from headroom.kubectl.eviction import EVERY_S, Clock
from headroom.kubectl.options import DataFormat, Namespace, Options, timeout_seconds
from headroom.kubectl.output import print_data, show_lines
from headroom.kubectl.top import counted

Body = Mapping[str, Any]
CLOCK = Clock(time.monotonic, time.sleep)
#: Maximum number of nodes named in a line.
_MOST_NAMES = 5


def defrag(
    context: typer.Context,
    pod: Annotated[
        str | None,
        typer.Argument(help="The waiting pod, or namespace/name; default: every waiting pod."),
    ] = None,
    namespace: Namespace = None,
    free_node: Annotated[
        bool, typer.Option("--free-node", help="Free the GPUs of a node instead.")
    ] = False,
    node: Annotated[str | None, typer.Option(help="Move only pods of this node.")] = None,
    apply: Annotated[
        bool,
        typer.Option(
            "--apply", help="Evict the pods one at a time; stop if one lands on another node."
        ),
    ] = False,
    timeout: Annotated[
        str, typer.Option(help="With --apply: time until each eviction has its effect.")
    ] = "5m",
    output: DataFormat = None,
) -> None:
    """Name the fewest pods whose move makes a waiting pod fit, or frees the GPUs of a node.

    Only pods whose controller creates them again are moved, each only if it fits on two other
    nodes at least. Nothing is changed without --apply. The exit status is 1 if there are no moves,
    or if --apply stops early.
    """
    if pod is not None and free_node:
        raise CommandError("--free-node needs no pod: remove one of both", BAD_INPUT)
    if apply and pod is None and not free_node:
        raise CommandError(
            "--apply needs the name of a waiting pod, or --free-node. "
            "Example: kubectl headroom defrag trainer-0 --apply",
            BAD_INPUT,
        )
    timeout_s = timeout_seconds(timeout)
    options: Options = context.obj
    api = options.api()
    asked = None if pod is None else "/".join(options.pod(pod, namespace))

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
    """Yield the text of an answer; ``applies``: without the command that applies it."""
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
    yield f"not checked: {', '.join(body['not_checked'])}"


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
    goal = answer["pod"] or f"--free-node --node {answer['node']}"
    return f"kubectl headroom defrag {goal} --apply"


def _name(move: Body) -> str:
    return f"{move['namespace']}/{move['name']}"


def _named(nodes: list[str], places: int) -> str:
    more = places - min(len(nodes), _MOST_NAMES)
    return ", ".join(nodes[:_MOST_NAMES]) + (f" and {more} more" if more else "")


class Pods(Protocol):
    """The API server, as far as moves use it."""

    def pod(self, namespace: str, name: str) -> PodRead | None: ...

    def created_by(self, namespace: str, controller_uid: str) -> list[Created]: ...

    def evict(self, namespace: str, name: str, uid: str) -> tuple[Outcome, str]: ...


@dataclass(frozen=True, slots=True)
class Step:
    """A line about what happened, and whether the command stops without success."""

    line: str
    stops: bool = False


def applied(
    answer: Body,
    ask: Callable[[str | None], Body],
    pods: Pods,
    timeout_s: float,
    clock: Clock,
) -> Iterator[Step]:
    """Move the pods of the answer one at a time, and yield each step.

    ``ask`` returns the newest answer about moves from a node. Raises ``CommandError``.
    """
    node = answer["node"]
    #: Moves that the user has seen, and that remain.
    remaining = len(answer["moves"])
    evicted: set[str] = set()
    deadline_s = clock.monotonic_s() + timeout_s
    while True:
        moves = answer["moves"]
        match answer["outcome"]:
            case "bound" | "free":
                yield Step(_done(answer))
                return
            case "none":
                yield Step(f"stopped: {answer['message']}", True)
                return
            case "move" if not evicted & {move["uid"] for move in moves}:
                if len(moves) > remaining:
                    yield Step(
                        f"stopped: the cluster has changed: {counted(len(moves), 'move')} would be "
                        f"needed now, and {remaining} remained; run the command again",
                        True,
                    )
                    return
                move = moves[0]
                remaining, evicted = len(moves) - 1, evicted | {move["uid"]}
                for step in _moved(move, node, pods, timeout_s, clock):
                    yield step
                    if step.stops:
                        return
                deadline_s = clock.monotonic_s() + timeout_s
            case _:
                # The scheduler, a kubelet, or the debug API's watch needs a moment.
                left_s = deadline_s - clock.monotonic_s()
                if left_s <= 0:
                    yield Step(f"stopped: after {timeout_s:g} s still: {answer['message']}", True)
                    return
                clock.sleep(min(EVERY_S, left_s))
        answer = ask(node)["answers"][0]


def _done(answer: Body) -> str:
    return (
        answer["message"] if answer["pod"] is None else f"pod {answer['pod']}: {answer['message']}"
    )


def _moved(move: Body, node: str, pods: Pods, timeout_s: float, clock: Clock) -> Iterator[Step]:
    """Evict one pod, and wait until its successor is bound."""
    deadline_s = clock.monotonic_s() + timeout_s
    namespace, name, uid = move["namespace"], move["name"], move["uid"]
    read = pods.pod(namespace, name)
    if read is None or read.uid != uid or read.ends:
        yield Step(f"pod {_name(move)}: ends already, and is not evicted")
        return
    before = {each.uid for each in pods.created_by(namespace, read.controller_uid)}
    waits_for = ""
    while True:
        outcome, why = pods.evict(namespace, name, uid)
        left_s = deadline_s - clock.monotonic_s()
        if outcome is Outcome.FAILED or (outcome is Outcome.LATER and left_s <= 0):
            yield Step(f"stopped: pod {_name(move)} cannot be evicted: {why}", True)
            return
        if outcome is not Outcome.LATER:
            break
        if why != waits_for:
            waits_for = why
            yield Step(f"pod {_name(move)}: waits: {why}")
        clock.sleep(min(EVERY_S, left_s))
    yield Step(f"pod {_name(move)}: evicted from node {node}")
    while True:
        found = pods.created_by(namespace, read.controller_uid)
        successors = [each for each in found if each.uid not in before]
        bound = next((each for each in successors if each.node), None)
        left_s = deadline_s - clock.monotonic_s()
        if bound is not None or left_s <= 0:
            yield _landed(move, bound, successors, timeout_s)
            return
        clock.sleep(min(EVERY_S, left_s))


def _landed(
    move: Body, bound: Created | None, successors: Sequence[Created], timeout_s: float
) -> Step:
    """Return the result of an eviction; it stops unless the successor is on a simulated node."""
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
        f"To see why: kubectl headroom why {waits}",
        True,
    )
