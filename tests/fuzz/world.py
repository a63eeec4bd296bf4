"""A small cluster that receives hostile inputs, and records the responses that must not change.

One replica runs in this process, with the cluster state, a ledger over the in-memory store, and the
applications for the verbs and the console, which are called without a network. ``answers`` are the
responses to a few valid calls before the first hostile input. Later responses are compared with
them.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from extender.metrics import Telemetry
from extender.scheduler.journal_endpoint import JournalSource, journal_routes
from extender.scheduler.server import VerbsApp
from headroom.console.app import console_app
from headroom.console.feed.journals import Journals
from headroom.console.shared_answers import SharedAnswers
from headroom.console.view_context import Context
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Pod
from headroom.contract.watched import NamespaceSeen, NodeSeen
from headroom.core.cluster.changes import Event
from headroom.core.journal.decision_records import Bounds
from headroom.core.journal.journal import Journal
from headroom.runtime.follow.claims import Claims
from headroom.runtime.follow.journal_stream import StateLine
from headroom.runtime.kube.profiles import Profiles
from headroom.runtime.settings.settings import Settings
from tests import builders as make
from tests.blocking import now
from tests.builders import GIB
from tests.fuzz.watchdog import Harm
from tests.serving import Reply, offer
from tests.serving import pod as sent_pod
from tests.state.states import EPOCH_S
from tests.world import World

#: The names of the nodes in the recorded calls.
NODES = [f"gpu-a100-{index:04d}" for index in range(1, 6)]
#: The requested memory of each pending pod.
WAITING = {"small": "2Gi", "half": "12Gi", "large": "30Gi", "none": None}
#: The reserved bytes of each pod that fits. A pod without a request gets the share of one replica.
RESERVED_BYTES = {"small": 2 * GIB, "half": 12 * GIB, "none": 6 * GIB}
#: All worlds share these metrics, because creating their series takes longer than the rest of a
#: world.
_TELEMETRY = Telemetry(CollectorRegistry())


def waiting() -> list[dict[str, Any]]:
    return [sent_pod(name, vram) for name, vram in WAITING.items()]


def sound_nodes() -> list[GPUNode]:
    """Return valid nodes: two nodes with shared GPUs (one with a pod), a GPU with unknown
    processes, and a GPU with MIG devices.
    """
    node = functools.partial(make.gpunode, plugin=make.DISTRIBUTED)
    a = make.shared("GPU-a", free=2, allocated=2, used_bytes=6 * GIB)
    sits = make.reservation({"GPU-a": 8 * GIB, "GPU-b": GIB}, name="sits", choices=["GPU-a"])
    held = make.use("uid-sits", "GPU-a", 6 * GIB, replica="GPU-a::0", name="sits")
    others = {"used_bytes": 3 * GIB, "unattributed_bytes": GIB, "sharing": "mps"}
    e = make.shared("GPU-e", free=1, allocated=3, **others)
    slices = [make.mig(f"MIG-{n}", n, resource="nvidia.com/mig-1g.10gb") for n in range(3)]
    return [
        node(a, make.shared("GPU-b"), name=NODES[0], reservations={"uid-sits": sits}, pods=[held]),
        node(make.shared("GPU-c"), make.shared("GPU-d"), name=NODES[1]),
        node(e, name=NODES[2]),
        node(*slices, name=NODES[3]),
    ]


@functools.cache
def _sound_calls() -> list[tuple[str, str, bytes]]:
    """Return the pod, verb and body of each valid call."""
    calls = []
    for each in waiting():
        # Set the policy, because by default the score depends on the demand of all earlier calls.
        each["metadata"]["annotations"]["headroom.gpu/policy"] = "pack"
        for verb, names in (("filter", NODES), ("prioritize", NODES[:4])):
            body = json.dumps(offer(each, *names)).encode()
            calls.append((each["metadata"]["name"], verb, body))
    return calls


class Attacked(World):
    def __init__(self) -> None:
        settings = Settings()
        self.claims = Claims(self.monotonic_s)
        # Reports never become stale in this world.
        super().__init__(settings.rules, stale_after_s=1e9)
        self.cluster, self.profiles = self.state.cluster, Profiles()
        self.journal = Journal(Bounds(decisions=64))
        self.telemetry = _TELEMETRY
        calls = self.verbs(telemetry=_TELEMETRY)
        self._endpoints = VerbsApp(calls, _TELEMETRY, settings.max_body).endpoints
        context = Context(
            self.cluster,
            Journals("one", self.journal),
            _TELEMETRY,
            str,
            self.monotonic_s,
            self.wall_s,
            profiles=self.profiles,
            claims=self.claims,
            answers=SharedAnswers(0.0),
        )
        state = StateLine("one", "", EPOCH_S, 0, "", "enforce")
        stream = JournalSource("one", self.journal, lambda: state, ended=True)
        self.journal_routes = journal_routes(stream)
        self.console = console_app(context, self.journal_routes)
        self.deliver([NamespaceSeen(make.namespace("team", {"headroom.gpu/default-vram": "4Gi"}))])
        for each in sound_nodes():
            assert each.status is not None
            self.deliver([NodeSeen(make.kube_node(each.name))])
            self.store.create_gpunode(each)
            self.store.report([(each.name, each.status)])
        self._admit("sits", "8Gi", node=NODES[0], phase="Running")
        for name, vram in WAITING.items():
            self._admit(name, vram)
        self._before = self._state()

    def _admit(self, name: str, vram: str | None, **how: Any) -> None:
        self.store.admit(make.pod(vram, uid=f"uid-{name}", name=name, **how))

    def deliver(self, events: Sequence[Event]) -> None:
        super().deliver(events)
        self.claims.apply(events)

    def deliver_for_people(self, events: Sequence[Event]) -> None:
        """Deliver claims and profiles, which affect only views."""
        self.profiles.apply(events)
        self.claims.apply(events)

    def call(self, verb: str, *chunks: bytes) -> Reply:
        """Call the application of a verb. The body arrives in these chunks."""
        sent: dict[str, Any] = {}
        pieces = [
            {"type": "http.request", "body": chunk, "more_body": at + 1 < len(chunks)}
            for at, chunk in enumerate(chunks)
        ]

        async def receive() -> dict[str, Any]:
            return pieces.pop(0) if pieces else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.update(message)

        scope = {"type": "http", "method": "POST", "path": f"/{verb}", "headers": []}
        now(self._endpoints[f"/{verb}"](scope, receive, send))
        return Reply(sent["status"], sent["body"])

    def bound(self) -> list[Pod]:
        """Return the pods that a call has bound."""
        return [pod for pod in self.store.list_pods() if pod.node and pod.metadata.name in WAITING]

    def restore(self) -> None:
        """Undo the binding of all bound pods."""
        for each in self.bound():
            name = each.metadata.name
            self.store.delete_pod(each.metadata.namespace, name)
            self.ledger.remove(each.node, each.metadata.uid, left=True)
            self._admit(name, WAITING[name])
        self.unharmed()

    def unharmed(self) -> None:
        """Raise ``Harm`` if reservations, bound pods, or the responses to valid calls have
        changed.
        """
        for what, after in self._state().items():
            if after != (before := self._before[what]):
                raise Harm(f"{what} changed: {before!r:.300}, {after!r:.300}")

    def _state(self) -> dict[str, object]:
        held = [self.store.read_gpunode(name) for name in NODES[:4]]
        state: dict[str, object] = {
            "reservations": [each and each.spec.reservations for each in held],
            "bound pods": sorted((each.metadata.uid, each.node) for each in self.store.list_pods()),
        }
        # Advance the clock, because for 5 s memory is held for pods of groups and for preempting
        # pods.
        self.now_s += 6.0
        for name, verb, body in _sound_calls():
            reply = self.call(verb, body)
            if reply.status != 200:
                raise Harm(f"a sound {verb} is answered {reply.status}: {reply.body!r:.300}")
            state[f"the answer to {verb} of {name}"] = reply.body
            self.now_s += 0.5
        return state
