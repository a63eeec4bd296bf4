"""Feeds hostile request bodies to the scheduler's verbs, in both forms of the protocol and in
several chunks.
"""

import json
from collections import Counter
from typing import Any

import msgspec

from headroom.contract.kube import Pod
from tests.fuzz.samples import recorded, rich_pod
from tests.fuzz.watchdog import Harm, Target
from tests.fuzz.world import NODES, RESERVED_BYTES, Attacked, waiting
from tests.serving import Reply, binding, offer
from tests.serving import pod as sent_pod

#: Maximum size of the response to a rejected body, because longer responses could fill logs and
#: Events.
_MOST_ERROR_BYTES = 1200


class VerbTarget(Target):
    """A target for one verb. Checks each response and the changes that the call made in the
    world.
    """

    def __init__(self, verb: str) -> None:
        self.name = self._verb = verb
        recorded_seeds = recorded(verb)
        # Calls with complete nodes are rare, because complete nodes are large.
        small = [body for body in recorded_seeds if not body.get("Nodes")]
        self.seeds = [*recorded_seeds, *(small + _own(verb)) * 9]
        self.world = Attacked()

    def check(self) -> None:
        self.world.unharmed()

    def take(self, data: bytes) -> bool:
        world, before = self.world, self.world.cluster.snapshot().generation
        cut = len(data) // 2
        pieces = (data,) if len(data) % 4 else (data[:cut], data[cut:])
        reply = world.call(self._verb, *pieces)
        taken, bound = self._judge(reply, data), world.bound()
        if bound and not taken:
            raise Harm(f"bound all the same: {reply.body!r:.200}")
        for pod in bound:
            self._check_bound(pod, data)
        if world.cluster.snapshot().generation != before:
            world.restore()
        return taken

    def _judge(self, reply: Reply, data: bytes) -> bool:
        """Return whether the call was accepted. Raise ``Harm`` if the response is wrong."""
        if reply.status in (400, 413) and self._verb in ("prioritize", "preempt"):
            if not 0 < len(reply.body) <= _MOST_ERROR_BYTES:
                raise Harm(f"{reply.status}: {reply.body!r:.200}")
            return False
        answer = _read(reply.body)
        if reply.status != 200 or answer is None:
            raise Harm(f"status {reply.status}: {reply.body!r:.200}")
        if error := isinstance(answer, dict) and answer.get("Error"):
            if "%" in error or len(error) > _MOST_ERROR_BYTES:
                raise Harm(f"error that cannot be shown: {error!r:.200}")
            return False
        if self._verb == "filter" and (asked := _read(data)) is not None:
            _check_partition(asked, answer)
        if self._verb == "prioritize" and not all(0 <= int(each["Score"]) <= 10 for each in answer):
            raise Harm(f"scores: {answer!r:.200}")
        return True

    def _check_bound(self, pod: Pod, data: bytes) -> None:
        """Check that the call named the pod exactly, and that the pod was bound with its own
        request to a node on which it fits.
        """
        asked = _read(data)
        bound = binding(msgspec.to_builtins(pod), pod.node)
        if asked is not None and not bound.items() <= asked.items():
            raise Harm(f"bound {bound} for {asked}")
        if pod.metadata.name not in RESERVED_BYTES or pod.node not in NODES[:4]:
            raise Harm(f"bound {bound}, which does not fit")
        held = self.world.store.read_gpunode(pod.node)
        assert held is not None
        charges = held.spec.reservations[pod.metadata.uid].charges
        sizes = {size for charge in charges for size in charge.candidates.values()}
        if sizes != {RESERVED_BYTES[pod.metadata.name]}:
            raise Harm(f"reserved for {pod.metadata.name}: {charges}")


def _read(data: bytes) -> Any:
    """Decode the body with an independent decoder. Return None if the decoder rejects the body.

    The decoder accepts invalid UTF-8 and numbers of any length, because complete nodes can contain
    them.
    """
    try:
        return json.loads(data.decode(errors="replace"), parse_int=str)
    except (ValueError, RecursionError):
        return None


def _check_partition(asked: dict[str, Any], answer: dict[str, Any]) -> None:
    """Check that the response passes or rejects every offered node and contains no other node.

    Nodes may have any order. The labels of unknown nodes decide, but only for the first 100 nodes.
    Therefore a node that is offered twice can both pass and be rejected.
    """
    if asked.get("NodeNames") is None:
        offered = [node["metadata"]["name"] for node in asked["Nodes"]["items"]]
        passed = [node["metadata"]["name"] for node in answer["Nodes"]["items"]]
    else:
        offered, passed = asked["NodeNames"], answer["NodeNames"]
    rejected = answer["FailedAndUnresolvableNodes"]
    both = set(passed) & set(rejected) and len(offered) <= 100
    expected = Counter(name for name in offered if name in passed)
    differs = Counter(passed) != expected if len(offered) <= 100 else Counter(passed) - expected
    if both or differs or set(passed) | set(rejected) != set(offered):
        raise Harm(f"offered {offered!r:.200}, passed {passed!r:.200}, refused {rejected!r:.200}")
    if any("%" in sentence for sentence in rejected.values()):
        raise Harm(f"refused {rejected!r:.300}")


def _own(verb: str) -> list[Any]:
    """Return bodies with names and annotations that the recorded calls do not contain."""
    if verb == "bind":
        return [binding(each, node) for each in waiting() for node in (*NODES[:4], "nowhere")]
    pods = [*waiting(), rich_pod(), sent_pod("m", "5%")]
    if verb != "preempt":
        return [offer(each, *NODES[:4], "nowhere") for each in pods]
    named = {node: {"Pods": [{"UID": "uid-sits"}], "NumPDBViolations": 0} for node in NODES[:4]}
    body = {"NodeNameToVictims": None, "NodeNameToMetaVictims": named}
    return [{"Pod": each, **body} for each in pods]


class ForgedTarget(VerbTarget):
    """A target that sends a filter call with forged pods, followed by a valid bind of one of the
    pods.
    """

    _BIND = json.dumps(binding(sent_pod("half"), NODES[1])).encode()

    def __init__(self) -> None:
        super().__init__("bind")
        self.name = "forged"
        shown = ("1Mi", "12Gi", "0.1%", None)
        self.seeds = [offer(sent_pod("half", vram), *NODES[:4]) for vram in shown]

    def take(self, data: bytes) -> bool:
        self.world.call("filter", data)
        return super().take(self._BIND)
