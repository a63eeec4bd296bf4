"""A small cluster that hostile inputs are sent to, and the answers that it must go on giving.

One replica in this process: the cluster state, a ledger over the store in memory, and the verbs'
application, called without a network. It is not judged by its own code: ``answers`` are the bytes
that a few sound calls got before the first hostile input.
"""

import functools
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from contract.gpunode import GPUNode
from extender.config.settings import Settings
from extender.ledger.bind import BindRequest, Bound, Outcome
from extender.ledger.memory_store import EmbeddedStore
from extender.observability.metrics import Telemetry
from extender.scheduler.server import VerbsApp
from extender.state.changes import Event, GPUNodeSeen, NamespaceSeen, NodeSeen
from extender.state.cluster_writer import ClusterWriter
from extender.state.decision_records import Bounds
from extender.state.journal import Journal
from tests.blocking import ledger_over, now
from tests.builders import (
    DISTRIBUTED,
    GIB,
    gpunode,
    kube_node,
    mig,
    namespace,
    pod,
    reservation,
    shared,
    use,
)
from tests.fuzz.watchdog import Harm
from tests.scheduler.verbs_on import verbs_on
from tests.serving import Reply, offer
from tests.serving import pod as sent_pod

RECORDED = Path(__file__).parents[1] / "recorded/kube-scheduler"
#: As in the recorded calls.
NODES = [f"gpu-a100-{index:04d}" for index in range(1, 6)]
#: Pods that wait, by name: what they ask for.
WAITING = {"small": "2Gi", "half": "12Gi", "large": "30Gi", "none": None}
#: 2026-11-21T00:00:00Z, the moment of the reports.
WALL_S = 1_795_219_200.0


def recorded(verb: str) -> list[Any]:
    """Bodies of real calls, of five nodes each."""
    return [
        json.loads(gzip.decompress(path.read_bytes()))["body"]
        for path in sorted(RECORDED.glob(f"{verb}-5nodes-*.json.gz"))
    ]


def waiting() -> list[dict[str, Any]]:
    return [sent_pod(name, vram) for name, vram in WAITING.items()]


def rich_pod() -> dict[str, Any]:
    """Return a pod with parts that the recorded pods lack."""
    rich = sent_pod("rich", "main=8Gi,side=1Gi")
    rich["metadata"]["annotations"] |= {
        "headroom.gpu/policy": "spread",
        "headroom.gpu/max-sm": "70%",
        "headroom.gpu/processes": "2",
        "headroom.gpu/retry": "x",
        "headroom.gpu/placement": '{"node": "n", "asked": "8Gi"}',
        "hami.io/vgpu-node": "n",
        "runai-gpu": "0",
        "ALIYUN_COM_GPU_MEM_IDX": "0",
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
    return rich


def sound_nodes() -> list[GPUNode]:
    """Two nodes of shared GPUs, one of whole ones, one cut up; the first with a pod on it."""
    a, b = shared("GPU-a", free=2, allocated=2, used_bytes=6 * GIB), shared("GPU-b")
    slices = [mig(f"MIG-{index}", index, resource="nvidia.com/mig-1g.10gb") for index in range(3)]
    occupied = {
        "reservations": {"uid-sits": reservation({"GPU-a": 8 * GIB}, name="sits")},
        "pods": [use("uid-sits", "GPU-a", 6 * GIB, replica="GPU-a::0", name="sits")],
    }
    return [
        gpunode(*devices, name=name, uid=f"gn-{name}", version="10", plugin=DISTRIBUTED, **more)
        for name, devices, more in (
            (NODES[0], [a, b], occupied),
            (NODES[1], [shared("GPU-c"), shared("GPU-d")], {}),
            (NODES[2], [shared("GPU-e", free=1)], {}),
            (NODES[3], slices, {}),
        )
    ]


@functools.cache
def _sound_calls() -> list[tuple[str, str, bytes]]:
    """Return pod, verb and body."""
    calls = []
    for each in waiting():
        # By default, the score depends on the demand of all earlier calls.
        each["metadata"]["annotations"]["headroom.gpu/policy"] = "pack"
        for verb, names in (("filter", NODES), ("prioritize", NODES[:4])):
            body = json.dumps(offer(each, *names)).encode()
            calls.append((each["metadata"]["name"], verb, body))
    return calls


class World:
    def __init__(self) -> None:
        self.now_s = 1000.0
        settings = Settings()
        # No report becomes stale here.
        epoch_s = WALL_S - self.now_s
        self.cluster = ClusterWriter(settings.rules, 1e9, epoch_s)
        self.store = EmbeddedStore(self.deliver, lambda: self.now_s)
        self.telemetry = Telemetry(CollectorRegistry())
        self.journal = Journal(Bounds(decisions=64))
        self.bound: list[BindRequest] = []
        self.ledger = ledger_over(
            self.cluster,
            self.store,
            lambda: self.now_s,
            epoch_s=epoch_s,
            written=lambda gpunode: self.deliver([GPUNodeSeen(gpunode, self.now_s)]),
        )
        self.verbs = verbs_on(
            self.cluster, lambda: self.now_s, self, self.journal, self.telemetry, epoch_s
        )
        self._routes = VerbsApp(self.verbs, self.telemetry, settings.max_body).endpoints
        self.deliver([NamespaceSeen(namespace("team", {"headroom.gpu/default-vram": "4Gi"}))])
        for each in sound_nodes():
            self.deliver([NodeSeen(kube_node(each.name))])
            made = self.store.create_gpunode(each)
            assert each.status is not None
            self.store.write_spec(made, each.spec)
            self.store.report([(each.name, each.status)])
        self.store.admit(pod("8Gi", uid="uid-sits", name="sits", node=NODES[0], phase="Running"))
        for name, vram in WAITING.items():
            self.store.admit(pod(vram, uid=f"uid-{name}", name=name))
        self._before = self._state()

    def deliver(self, events: Sequence[Event]) -> None:
        self.cluster.apply(events)

    async def bind(self, ask: BindRequest) -> Outcome:
        outcome: Outcome = self.ledger.bind(ask)
        if isinstance(outcome, Bound):
            self.bound.append(ask)
        return outcome

    def call(self, verb: str, *chunks: bytes) -> Reply:
        """Call the application of a verb with the body in these pieces."""
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
        now(self._routes[f"/{verb}"](scope, receive, send))
        return Reply(sent["status"], sent["body"])

    def restore(self) -> None:
        """Remove bound pods, as if they had never been bound."""
        for ask in self.bound:
            self.store.delete_pod(ask.namespace, ask.name)
            self.ledger.remove(ask.node, ask.uid, left=True)
            self.store.admit(pod(WAITING[ask.name], uid=ask.uid, name=ask.name))
        self.bound.clear()
        self.unharmed()

    def unharmed(self) -> None:
        """Raise ``Harm`` if reservations, bound pods or the answers to sound calls have changed."""
        for what, after in self._state().items():
            if after != (before := self._before[what]):
                raise Harm(f"{what} changed: {before!r:.300}, {after!r:.300}")

    def _state(self) -> dict[str, object]:
        held = [self.store.read_gpunode(name) for name in NODES[:4]]
        state: dict[str, object] = {
            "reservations": [each and each.spec.reservations for each in held],
            "bound pods": sorted((each.metadata.uid, each.node) for each in self.store.list_pods()),
        }
        # Pods of groups, and pods that preempt, are expected to be bound for 5 s.
        self.now_s += 6.0
        for name, verb, body in _sound_calls():
            reply = self.call(verb, body)
            if reply.status != 200:
                raise Harm(f"a sound {verb} is answered {reply.status}: {reply.body!r:.300}")
            state[f"the answer to {verb} of {name}"] = reply.body
            self.now_s += 0.5
        return state
