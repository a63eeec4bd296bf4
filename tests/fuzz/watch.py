"""Feeds hostile objects, lines and lists into the cluster state as if the API server had sent them.

One node with its GPUNode and Lease is hostile. Objects of all other kinds are hostile if they name
no valid object. Hostile objects must not change the terms of valid nodes or the responses to valid
calls, whether or not the hostile node is offered. The console must still show each view.
"""

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

from headroom.contract.gpunode import GPUNode
from headroom.core.cluster.changes import Event
from headroom.runtime.kube.reflector import Reflector
from headroom.runtime.kube.resources import profile_kind
from tests.builders import GIB, MIB, NOW_S
from tests.console.asking import answer
from tests.fuzz.hostile import RAW
from tests.fuzz.samples import BAD, OBJECTS
from tests.fuzz.watchdog import Harm, Target
from tests.fuzz.world import NODES, Attacked
from tests.kube.canned import CannedApi
from tests.kube.following import KINDS
from tests.serving import offer
from tests.serving import pod as sent_pod

_KINDS = {**KINDS, "vramprofiles": profile_kind()}
_PATHS = (
    *("overview", "fleet", "map", "nodes", f"nodes/{BAD}", "pods", "pending", "teams"),
    *("drift", "recommendations?accepted=true", "capacity?vram=2Gi", "idle", "status", "snapshot"),
    *("decisions", "defrag", f"explain?pod=bad/{BAD}", "explain?pod=default/large"),
    *(f"timeline?pod=bad/{BAD}", f"score?pod=bad/{BAD}&node={BAD}"),
)
_WHATIFS: tuple[object, ...] = (
    {"pods": [{"vram": "2Gi", "count": 9}, {"vram": "25%"}], "replicas": {BAD: 2}},
    {"drain": [BAD]},
    {"release": [f"bad/{BAD}"], "device_choices": {BAD: "gated"}},
    {
        "device_choices": {BAD: "steered"},
        "add": [{"like": BAD}],
        "pods": [{"vram": "1Gi", "count": 20}],
    },
)
_VIEWS = *((path, None) for path in _PATHS), *(("whatif", asked) for asked in _WHATIFS)
#: Seconds on the world's clock after which a new world is started. This limits how many inputs
#: (2,000) can affect each other.
_LIFE_S = 300.0
#: Words that name valid objects. An input that contains such a word may change valid nodes.
_SOUND = [word.encode() for word in (*NODES, "uid-", '"sits"', '"default"', '"team"')]
_CALL = json.dumps(offer(sent_pod("small", "2Gi"), *NODES[:3], BAD)).encode()

_URGENT = sent_pod("urgent", "20Gi", gpus=2)
_URGENT["spec"]["priority"] = 100
_VICTIMS = {BAD: {"Pods": [{"UID": "bad"}], "NumPDBViolations": 0}}
_PREEMPT = json.dumps({"Pod": _URGENT, "NodeNameToMetaVictims": _VICTIMS}).encode()


class WatchTarget(Target):
    """A target for events of one kind. If ``listed`` is true, the events arrive as a list instead
    of a watch.
    """

    def __init__(self, kind: str, *, listed: bool) -> None:
        self.name = f"{'list' if listed else 'watch'}-{kind}"
        self.seeds, self._kind, self._listed = OBJECTS[kind], _KINDS[kind], listed
        self._api = CannedApi()
        self._renew()

    def make(self, random: Random) -> bytes:
        objects = [super(WatchTarget, self).make(random) for _ in range(random.choice((1, 1, 2)))]
        if self._listed:
            items = b",".join(objects)
            return b'{"metadata":{"resourceVersion":"7"},"items":[%b]}' % items
        kinds = (b"ADDED", b"MODIFIED", b"MODIFIED", b"DELETED", b"BOOKMARK", b"ERROR", b"X")
        lines = [
            b'{"type":"%b","object":%b}' % (random.choice(kinds), each.replace(b"\n", b" "))
            for each in objects
        ]
        between = random.choice((b"\n", b"\n", b"", b" ", b"\n \n", random.choice(RAW) + b"\n"))
        ends = b"\n", b"\n", b"\n", b"\n", b"\r\n", b"", b"\n\n\n", b"\n{", b"\x00\n"
        return between.join(lines) + random.choice(ends)

    def _renew(self) -> None:
        """Start a new world in which the objects of the hostile node are still valid."""
        self.world = Attacked()
        for name, kind in _KINDS.items():
            if name == "resourceslices" and self._kind.name != "resourceclaims":
                continue  # It would hand the node to DRA.
            read = kind.decode(msgspec.Raw(msgspec.json.encode(OBJECTS[name][0])))
            self._take(name, [kind.seen(read, self.world.now_s)])
        self._terms = self._sound_terms()

    def _sound_terms(self) -> dict[str, Any]:
        snap = self.world.cluster.snapshot()
        return {name: snap.nodes[snap.row_of[name]] for name in NODES[:4]}

    def check(self) -> None:
        self.world.unharmed()
        if self.world.now_s > NOW_S + _LIFE_S:
            self._renew()

    def take(self, data: bytes) -> bool:
        delivered = self._deliver(data)
        if (self._listed and delivered) or any(word in data for word in _SOUND):
            # Only check that no call crashes, because the input may have changed valid nodes.
            self.world.call("filter", _CALL)
            self.show(data)
            self._renew()
        elif self._sound_terms() != self._terms:
            raise Harm("a sound node is not what it was")
        elif len(data) % 8 == 0:
            self.offer_beside()
        elif len(data) % 8 == 1:
            self.show(data)
        return delivered

    def _take(self, kind: str, events: Sequence[Event]) -> None:
        world = self.world
        (world.deliver if kind in KINDS else world.deliver_for_people)(events)

    def _deliver(self, data: bytes) -> bool:
        """Return whether the input delivered any event. The reflector logs exceptions of the
        receiver.
        """
        delivered = 0

        def deliver(events: Sequence[Event]) -> None:
            nonlocal delivered
            delivered += len(events)
            self._take(self._kind.name, events)

        cut = Random(data).randrange(len(data))
        self._api.bodies = [[data[:cut], data[cut:]]]
        reflector = Reflector(
            self._kind,
            self._api,
            deliver,
            clock=lambda: self.world.now_s,
            wait=lambda _: reflector.stop(),
        )
        if not self._listed:
            reflector._version = "1"
        reflector.run()
        return delivered > 0

    def show(self, data: bytes) -> None:
        """Request one view of the console."""
        path, asked = Random(data).choice(_VIEWS)
        method = "GET" if asked is None else "POST"
        reply = answer(self.world.console, method, f"/v1/{path}", body=asked)
        if reply.status_code not in (200, 404, 422):
            raise Harm(f"{path}: {reply.status_code}: {reply.text!r:.300}")
        json.loads(reply.content, parse_constant=_fail)

    def offer_beside(self) -> None:
        """Send a filter call that offers the hostile node together with valid nodes."""
        world = self.world
        world.now_s += 0.5
        passed = json.loads(world.call("filter", _CALL).body)["NodeNames"]
        if [name for name in passed if name != BAD] != NODES[:3]:
            raise Harm(f"passed {passed}")
        held = world.cluster.gpunode(BAD)
        if BAD in passed and (held is None or not (held.status is None or _has_room(held))):
            raise Harm(f"2Gi are found to fit on {held}")
        for verb, body in (("prioritize", _CALL), ("preempt", _PREEMPT)):
            if (reply := world.call(verb, body)).status != 200:
                raise Harm(f"{verb}: {reply.status}: {reply.body!r:.300}")


def _fail(constant: str) -> None:
    raise Harm(f"{constant} is no JSON")


def _has_room(held: GPUNode) -> bool:
    """Return whether a device has 2 GiB free according to its own report."""
    devices = held.status.devices if held.status else []
    return any(
        device.memory_bytes - device.reserved_bytes - device.used_bytes + 64 * MIB >= 2 * GIB
        for device in devices
        if min(device.memory_bytes, device.reserved_bytes, device.used_bytes) >= 0
    )
