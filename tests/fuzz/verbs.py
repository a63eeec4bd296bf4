"""The scheduler's verbs under hostile bodies, in both forms, and in pieces."""

import json
from random import Random
from typing import Any

from tests.fuzz.hostile import Seed, attack
from tests.fuzz.watchdog import Harm
from tests.fuzz.world import NODES, WAITING, WorldTarget, recorded
from tests.serving import binding, offer
from tests.serving import pod as sent_pod

#: Longer answers to a rejected body could fill logs and events.
_MOST_ERROR_BYTES = 1200
#: Sound calls are repeated after so many hostile ones that left the snapshot as it was.
_EVERY = 100


class VerbTarget(WorldTarget):
    """One verb. A call of its own judges each answer; that nothing else changed the world does."""

    def __init__(self, verb: str) -> None:
        super().__init__()
        self.name = verb
        self._seeds = [Seed.of(body) for body in [*recorded(verb), *_own(verb)]]
        # Whole nodes are large: those calls come seldom.
        self._seeds += [seed for seed in self._seeds if len(seed.paths) < 400] * 8
        self._calls = 0

    def make(self, random: Random) -> bytes:
        return attack(self._seeds, random)

    def _taken(self, data: bytes) -> bool:
        world = self._world
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
        # Whole nodes go back as they came, with whatever is no UTF-8 in them.
        answer = json.loads(body.decode(errors="replace"), parse_int=_number)
        if error := isinstance(answer, dict) and answer.get("Error"):
            if "%" in error or len(error) > _MOST_ERROR_BYTES:
                raise Harm(f"error that cannot be shown: {error!r:.200}")
            return False
        if self.name == "filter":
            _check_partition(answer, data)
        if self.name == "prioritize" and not all(0 <= each["Score"] <= 10 for each in answer):
            raise Harm(f"scores: {answer!r:.200}")
        return True

    def _check_bound(self, data: bytes) -> None:
        """Only a pending pod, by its exact names, is bound, to a node on which it fits."""
        asked = _read(data)
        keys = ("PodNamespace", "PodName", "PodUID", "Node")
        for args in self._world.bound:
            bound = args.namespace, args.name, args.uid, args.node
            if asked is not None and bound != tuple(asked.get(key) for key in keys):
                raise Harm(f"bound {args} for {asked}")
            name = args.name
            if (args.namespace, args.uid) != ("default", f"uid-{name}"):
                raise Harm(f"bound {args}, which does not wait")
            if name not in WAITING or name == "large" or args.node not in NODES[:4]:
                raise Harm(f"bound {args}, which does not fit")


def _read(data: bytes) -> Any:
    """The result of another decoder; None if it rejects the body."""
    try:
        return json.loads(data.decode(errors="replace"), parse_int=_number)
    except (ValueError, RecursionError):
        return None


def _check_partition(answer: dict[str, Any], data: bytes) -> None:
    """Every offered node passes or is rejected, and no other is named."""
    asked = _read(data)
    if asked is None:
        return
    if asked.get("NodeNames") is None:
        offered = [node["metadata"]["name"] for node in asked["Nodes"]["items"]]
        passed = [node["metadata"]["name"] for node in answer["Nodes"]["items"]]
    else:
        offered, passed = asked["NodeNames"], answer["NodeNames"]
    rejected = answer["FailedAndUnresolvableNodes"]
    if passed != [name for name in offered if name not in rejected] or not set(rejected) <= set(
        offered
    ):
        raise Harm(f"offered {offered!r:.200}, passed {passed!r:.200}, refused {rejected!r:.200}")
    if any("%" in sentence for sentence in rejected.values()):
        raise Harm(f"refused {rejected!r:.300}")


def _own(verb: str) -> list[Any]:
    """Parts that the recorded pods lack: our annotations, and names of this cluster."""
    pods = [sent_pod(name, vram) for name, vram in WAITING.items()]
    rich = sent_pod("rich", "main=8Gi,side=1Gi")
    rich["metadata"]["annotations"] |= {
        "headroom.gpu/policy": "spread",
        "headroom.gpu/max-sm": "70%",
        "headroom.gpu/processes": "2",
        "headroom.gpu/retry": "x",
        "headroom.gpu/placement": '{"node": "n", "asked": "8Gi"}',
    }
    gpu = {"limits": {"nvidia.com/gpu": "1"}, "requests": {"nvidia.com/gpu": 1}}
    rich["spec"] |= {
        "containers": [
            {"name": "main", "resources": gpu},
            {"name": "side", "resources": gpu, "envFrom": [{"prefix": "A_"}]},
            {"name": "plain", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]},
        ],
        "initContainers": [{"name": "first", "restartPolicy": "Always", "resources": gpu}],
        "priority": 7,
        "nodeSelector": {"a": "b"},
    }
    match verb:
        case "filter" | "prioritize":
            return [
                offer(each, *NODES[:4], "nowhere") for each in [*pods, rich, sent_pod("m", "5%")]
            ]
        case "bind":
            return [binding(each, node) for each in pods for node in (*NODES[:4], "nowhere")]
    named = {node: {"Pods": [{"UID": "uid-sits"}], "NumPDBViolations": 0} for node in NODES[:4]}
    return [
        {"Pod": each, "NodeNameToVictims": None, "NodeNameToMetaVictims": named}
        for each in [*pods, rich]
    ]


class ForgedTarget(WorldTarget):
    """A filter call that shows pods as they are not, and then a sound bind of one of them."""

    name = "forged"

    def __init__(self) -> None:
        super().__init__()
        shown = [
            offer(sent_pod("half", vram), *NODES[:4]) for vram in ("1Mi", "12Gi", "0.1%", None)
        ]
        self._seeds = [Seed.of(body) for body in shown]

    def make(self, random: Random) -> bytes:
        return attack(self._seeds, random)

    def _taken(self, data: bytes) -> bool:
        world = self._world
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


def _number(digits: str) -> int | str:
    """Python makes no number of thousands of digits, which a node goes back with as it came."""
    return int(digits) if len(digits) < 20 else digits
