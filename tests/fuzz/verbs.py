"""The scheduler's verbs under hostile bodies, in both forms, and in pieces."""

import json
from typing import Any

from tests.fuzz.watchdog import Harm, Target
from tests.fuzz.world import NODES, World, recorded, rich_pod, waiting
from tests.serving import binding, offer
from tests.serving import pod as sent_pod

#: Longer answers to a rejected body could fill logs and events.
_MOST_ERROR_BYTES = 1200
#: Sound calls are repeated after so many hostile ones that left the snapshot as it was.
_EVERY = 100


class VerbTarget(Target):
    """One verb. A call of its own judges each answer; that nothing else changed the world does."""

    def __init__(self, verb: str) -> None:
        self.name = verb
        recorded_seeds = recorded(verb)
        # Whole nodes are large: those calls come seldom.
        small = [body for body in recorded_seeds if not body.get("Nodes")]
        self.seeds = [*recorded_seeds, *(small + _own(verb)) * 9]
        self.world = World()
        self._calls = 0

    def take(self, data: bytes) -> bool:
        world = self.world
        generation = world.cluster.snapshot().generation
        cut = len(data) // 2
        pieces = (data,) if self._calls % 4 else (data[:cut], data[cut:])
        reply = world.call(self.name, *pieces)
        self._calls += 1
        taken = self._judge(reply.status, reply.body, data)
        changed = world.cluster.snapshot().generation != generation
        if world.bound:
            self._check_bound(data)
            world.restore()
        elif changed or self._calls % _EVERY == 0:
            world.unharmed()
        return taken

    def _judge(self, status: int, body: bytes, data: bytes) -> bool:
        """Whether it was taken; raises ``Harm`` where it is not a proper answer."""
        if status in (400, 413):
            if self.name in ("filter", "bind") or not body or len(body) > _MOST_ERROR_BYTES:
                raise Harm(f"{status}: {body!r:.200}")
            return False
        if status != 200:
            raise Harm(f"status {status}: {body!r:.200}")
        if (answer := _read(body)) is None:
            raise Harm(f"no JSON: {body!r:.200}")
        if error := isinstance(answer, dict) and answer.get("Error"):
            if "%" in error or len(error) > _MOST_ERROR_BYTES:
                raise Harm(f"error that cannot be shown: {error!r:.200}")
            return False
        if self.name == "filter":
            _check_partition(answer, data)
        if self.name == "prioritize" and not all(0 <= int(each["Score"]) <= 10 for each in answer):
            raise Harm(f"scores: {answer!r:.200}")
        return True

    def _check_bound(self, data: bytes) -> None:
        """Only a pending pod, by its exact names, is bound, to a node on which it fits."""
        asked = _read(data)
        for args in self.world.bound:
            bound = {
                "PodNamespace": args.namespace,
                "PodName": args.name,
                "PodUID": args.uid,
                "Node": args.node,
            }
            if asked is not None and not bound.items() <= asked.items():
                raise Harm(f"bound {args} for {asked}")
            if (args.namespace, args.uid) != ("default", f"uid-{args.name}"):
                raise Harm(f"bound {args}, which does not wait")
            if args.name not in {"small", "half", "none"} or args.node not in NODES[:4]:
                raise Harm(f"bound {args}, which does not fit")


def _read(data: bytes) -> Any:
    """Return the result of another decoder; None if it rejects the body.

    Whole nodes go back as they came, with bytes that are no UTF-8 and numbers of any length.
    """
    try:
        return json.loads(data.decode(errors="replace"), parse_int=str)
    except (ValueError, RecursionError):
        return None


def _check_partition(answer: dict[str, Any], data: bytes) -> None:
    """Every offered node passes or is rejected, and no other is named. Their order is free."""
    asked = _read(data)
    if asked is None:
        return
    if asked.get("NodeNames") is None:
        offered = [node["metadata"]["name"] for node in asked["Nodes"]["items"]]
        passed = [node["metadata"]["name"] for node in answer["Nodes"]["items"]]
    else:
        offered, passed = asked["NodeNames"], answer["NodeNames"]
    rejected = answer["FailedAndUnresolvableNodes"]
    expected = [name for name in offered if name not in rejected]
    if sorted(passed) != sorted(expected) or not set(rejected) <= set(offered):
        raise Harm(f"offered {offered!r:.200}, passed {passed!r:.200}, refused {rejected!r:.200}")
    if any("%" in sentence for sentence in rejected.values()):
        raise Harm(f"refused {rejected!r:.300}")


def _own(verb: str) -> list[Any]:
    """Return bodies with names and annotations that the recorded calls lack."""
    if verb == "bind":
        return [binding(each, node) for each in waiting() for node in (*NODES[:4], "nowhere")]
    pods = [*waiting(), rich_pod(), sent_pod("m", "5%")]
    if verb != "preempt":
        return [offer(each, *NODES[:4], "nowhere") for each in pods]
    named = {node: {"Pods": [{"UID": "uid-sits"}], "NumPDBViolations": 0} for node in NODES[:4]}
    body = {"NodeNameToVictims": None, "NodeNameToMetaVictims": named}
    return [{"Pod": each, **body} for each in pods]


class ForgedTarget(Target):
    """A filter call that shows pods as they are not, and then a sound bind of one of them."""

    name = "forged"

    def __init__(self) -> None:
        self.world = World()
        self.seeds = [
            offer(sent_pod("half", vram), *NODES[:4]) for vram in ("1Mi", "12Gi", "0.1%", None)
        ]

    def take(self, data: bytes) -> bool:
        world = self.world
        world.call("filter", data)
        reply = world.call("bind", json.dumps(binding(sent_pod("half"), NODES[1])).encode())
        if json.loads(reply.body)["Error"]:
            if world.bound:
                raise Harm(f"bound all the same: {reply.body!r}")
            return False
        held = world.store.read_gpunode(NODES[1])
        reservation = held and held.spec.reservations.get("uid-half")
        charges = reservation.charges if reservation else []
        if [set(charge.candidates.values()) for charge in charges] != [{12 << 30}]:
            raise Harm(f"12Gi are reserved as {charges}")
        world.restore()
        return True
