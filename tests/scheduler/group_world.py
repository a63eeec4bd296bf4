"""Simulates kube-schedulers that schedule groups of pods, with extenders and one store, in
simulated time.

The schedulers behave like kube-scheduler 1.37. They call filter for all pods of a group, and if
enough pods have a node, they call all binds at the same time. They read only from the store which
pods are bound.
"""

import asyncio
import itertools
import json
import random
import selectors
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from extender.ledger.embedded_store import EmbeddedStore
from extender.ledger.ledger import Ledger
from extender.scheduler.server import Verbs
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Affinity, Pod, SchedulingGroup
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.cluster.changes import Event
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.policy import Rules
from tests.blocking import Faraway
from tests.builders import GIB, container, device, gpunode, kube_node, pod, shared
from tests.scheduler.verbs_on import verbs_on

T = TypeVar("T")
NEVER_STALE_S = 1e12
#: The shipped deadline of a bind.
DEADLINE_S = 4.0


class Clock(selectors.SelectSelector):
    """A clock that advances only while all tasks of a loop wait."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += timeout or 0.0
        return super().select(0)


@dataclass(frozen=True)
class Shape:
    """The size of a node, which has either one shared device or several unshared devices."""

    gib: int
    replicas: int = 1
    gpus: int = 1


@dataclass
class Gang:
    name: str
    #: GiB that each pod of the group requests on each of its devices.
    sizes: Sequence[int]
    minimum: int
    gpus: int = 1
    #: The node that the owner of the pods prefers.
    prefers: str = ""
    #: Whether a label makes the pods a group of the Coscheduling plugin.
    label: bool = False

    @property
    def pods(self) -> list[str]:
        return [f"{self.name}-{i}" for i in range(len(self.sizes))]


@dataclass
class Extender:
    state: ClusterWriter
    verbs: Verbs
    #: Number of calls of each verb.
    calls: Counter[str] = field(default_factory=Counter)


class GroupWorld:
    def __init__(self, shapes: Sequence[Shape], extenders: int = 1, seed: int = 0) -> None:
        self.clock, self.chance = Clock(), random.Random(seed)
        self.loop = asyncio.SelectorEventLoop(self.clock)
        self.loop.time = lambda: self.clock.now_s  # type: ignore[method-assign]
        self.shapes = {f"n{i}": shape for i, shape in enumerate(shapes)}
        self.store = EmbeddedStore(self._deliver, lambda: self.clock.now_s)
        self.extenders: list[Extender] = []
        #: The GiB and the number of GPUs that each pod requests.
        self.asked: dict[str, tuple[int, int]] = {}
        #: The node of each assumed pod. A scheduler has chosen the node, but the bind has not
        #: returned yet.
        self.assumed: dict[str, str] = {}
        #: Durations in seconds of the next writes of reservations to the API server.
        self.stalls_s: list[float] = []
        #: The node that each pod's owner prefers.
        self.preferred: dict[str, str] = {}
        for _ in range(extenders):
            self._add_extender()
        for name, shape in self.shapes.items():
            bytes_each = {"memory_bytes": shape.gib * GIB}
            devices = [
                shared(f"{name}-{i}", free=shape.replicas, **bytes_each)
                if shape.replicas > 1
                else device(f"{name}-{i}", **bytes_each)
                for i in range(shape.gpus)
            ]
            self._deliver([NodeSeen(kube_node(name))])
            self.store.create_gpunode(gpunode(*devices, name=name, initialised=False))
            self.store.report([(name, gpunode(*devices, name=name).status)])  # type: ignore[list-item]
            self.run(self._ledger.initialiser.initialise([kube_node(name)]))

    def _deliver(self, events: list[Event]) -> None:
        for extender in self.extenders:
            extender.state.apply(events)

    def restart(self, extender: Extender) -> None:
        """Replace a killed extender with a new extender, which lists all objects first."""
        self.extenders.remove(extender)
        self._add_extender()
        state = self.extenders[-1].state
        state.apply([NodeSeen(kube_node(name)) for name in self.shapes])
        state.apply([GPUNodeSeen(self.gpunode(name), self.clock.now_s) for name in self.shapes])
        state.apply([PodSeen(each) for each in self.store.list_pods()])

    def gpunode(self, name: str) -> GPUNode:
        found = self.store.read_gpunode(name)
        assert found is not None
        return found

    def remove_orphans(self) -> None:
        """Remove the reservations of unbound pods, as each extender does after 60 s."""
        bound = self.bound()
        for name in self.shapes:
            for uid in self.gpunode(name).spec.reservations.keys() - bound.keys():
                assert self.run(self._ledger.reservations.remove(name, uid))

    def reserved(self) -> set[str]:
        """Return the pods that have reservations."""
        return {uid for name in self.shapes for uid in self.gpunode(name).spec.reservations}

    def _add_extender(self) -> None:
        state = ClusterWriter(Rules(), NEVER_STALE_S, 0.0)
        numbers = itertools.count()
        self._ledger = Ledger(
            Faraway(self.store, self._meanwhile),
            lambda pod, gpunode: state.cluster.judge(pod, gpunode, self.clock.now_s),
            state.cluster.adopt,
            written=lambda gpunode: None,
            wall_s=lambda: self.clock.now_s,
            new_id=lambda: f"{len(self.extenders)}-{next(numbers)}",
            monotonic_s=lambda: self.clock.now_s,
        )
        verbs = verbs_on(
            state,
            lambda: self.clock.now_s,
            self._ledger.binder,
            best_only=True,
            bind_deadline_s=DEADLINE_S,
        )
        self.extenders.append(Extender(state, verbs))

    async def _meanwhile(self, operation: str, when: str) -> None:
        """Sleep for a random time, as the API server would take before and after an operation."""
        await asyncio.sleep(self.chance.uniform(0, 0.01))
        if operation == "write_spec" and when == "before" and self.stalls_s:
            await asyncio.sleep(self.stalls_s.pop())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        self.loop.close()

    def create(
        self,
        name: str,
        gib: int,
        gpus: int = 1,
        group: str = "",
        prefers: str = "",
        label: bool = False,
    ) -> None:
        made = pod(f"{gib}Gi", container(gpus=gpus), uid=name, name=name, version="")
        spec = made.spec
        if group and label:
            labels = {"scheduling.x-k8s.io/pod-group": group}
            made = replace(made, metadata=replace(made.metadata, labels=labels))
        elif group:
            spec = replace(spec, scheduling_group=SchedulingGroup(pod_group_name=group))
        if prefers:
            self.preferred[name] = prefers
            term = {
                "matchFields": [{"key": "metadata.name", "operator": "In", "values": [prefers]}]
            }
            weighted = {"weight": 100, "preference": term}
            node = {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}
            spec = replace(spec, affinity=msgspec.convert({"nodeAffinity": node}, Affinity))
        made = replace(made, spec=spec)
        self.asked[name] = gib, gpus
        self.store.admit(made)

    def create_gang(self, gang: Gang) -> None:
        for name, gib in zip(gang.pods, gang.sizes, strict=True):
            self.create(name, gib, gang.gpus, gang.name, gang.prefers, gang.label)

    def delete(self, name: str) -> None:
        """Delete an ended pod, and remove its reservation."""
        node = self.bound().get(name)
        self.store.delete_pod("default", name)
        if node is not None:
            self.run(self._ledger.reservations.remove(node, name, left=True))

    def bound(self) -> dict[str, str]:
        """Return the node of each bound pod."""
        return {each.metadata.name: each.node for each in self.store.list_pods() if each.node}

    def members(self, gang: Gang) -> int:
        """Return the number of bound pods in the group."""
        return len(self.bound().keys() & set(gang.pods))

    def free(self, node: str) -> int:
        """Return the GiB that are free for a new pod on the node. Return 0 if no replica is
        free.
        """
        shape, here = self.shapes[node], [p for p, n in self.bound().items() if n == node]
        if sum(self.asked[name][1] for name in here) >= shape.replicas * shape.gpus:
            return 0
        return shape.gib - (sum(self.asked[name][0] for name in here) if shape.gpus == 1 else 0)

    def check(self) -> None:
        """Fail if a device is overcommitted."""
        for node, shape in self.shapes.items():
            here = [self.asked[name] for name, on in self.bound().items() if on == node]
            assert sum(gpus for _, gpus in here) <= shape.replicas * shape.gpus
            if shape.gpus == 1:
                assert sum(gib for gib, _ in here) <= shape.gib

    async def choose(self, name: str, by: Extender) -> str | None:
        """Return the node that a scheduler chooses for the pod."""
        shown = self.store.read_pod("default", name)
        assert shown is not None
        taken: Counter[str] = Counter()
        for other, node in (self.bound() | self.assumed).items():
            taken[node] += self.asked[other][1]
        gpus = self.asked[name][1]
        nodes = [n for n, s in self.shapes.items() if taken[n] + gpus <= s.replicas * s.gpus]
        if not nodes:
            return None
        # NodeNames is null if filter returns an error, which delays some pods when many pods are
        # retried together.
        passed = json.loads(by.verbs.filter(offer(shown, nodes)))["NodeNames"] or []
        by.calls["filter"] += 1
        if len(passed) < 2:
            return passed[0] if passed else None
        scores = json.loads(by.verbs.prioritize(offer(shown, passed)))
        by.calls["prioritize"] += 1
        if (wished := self.preferred.get(name, "")) in passed:
            return wished
        best: str = max(scores, key=lambda each: each["Score"])["Host"]
        return best

    async def bind(self, name: str, node: str, by: Extender) -> bool:
        args = {"PodName": name, "PodNamespace": "default", "PodUID": name, "Node": node}
        by.calls["bind"] += 1
        try:
            answer = json.loads(await by.verbs.bind(json.dumps(args).encode()))
        finally:
            self.assumed.pop(name, None)
        return not answer["Error"]

    async def schedule(self, name: str, by: Extender) -> bool:
        """Run a scheduling attempt of a single pod. Return whether it was bound."""
        node = await self.choose(name, by)
        if node is None:
            return False
        self.assumed[name] = node
        return await self.bind(name, node, by)

    async def cycle(self, gang: Gang, by: Extender, pause_s: float = 0.0) -> dict[str, str]:
        """Choose nodes for all pods of the group. Return an empty dictionary if the group has to
        wait.
        """
        waiting = [name for name in gang.pods if name not in self.bound()]
        if gang.label:  # the plugin tries pods in the order in which they were requeued
            self.chance.shuffle(waiting)
        scheduled, chosen = len(gang.pods) - len(waiting), dict[str, str]()
        for left, name in zip(range(len(waiting), 0, -1), waiting, strict=True):
            if scheduled + left < gang.minimum:
                break
            await asyncio.sleep(pause_s)
            node = await self.choose(name, by)
            if node is not None:
                self.assumed[name] = chosen[name] = node
                scheduled += 1
        if scheduled < gang.minimum:
            for name in chosen:
                self.assumed.pop(name, None)
            return {}
        return chosen

    async def bind_all(self, chosen: dict[str, str], by: Extender) -> int:
        """Bind the pods concurrently. Return the number of bound pods."""
        work = [self.bind(name, node, by) for name, node in chosen.items()]
        return sum(await asyncio.gather(*work))

    async def schedule_gang(self, gang: Gang, by: Extender, pause_s: float = 0.0) -> int:
        return await self.bind_all(await self.cycle(gang, by, pause_s), by)


def offer(shown: Pod, nodes: Sequence[str]) -> bytes:
    body = {"Pod": msgspec.to_builtins(shown), "NodeNames": list(nodes)}
    return json.dumps(body).encode()
