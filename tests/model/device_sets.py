"""Plays random nodes on which pods request several devices, and judges every step.

The extender's placement and the agent's choice are the product's. The kubelet, the device plugin
and the judge are written here, and share no code with the product. The kubelet reuses the devices
of init containers, asks the agent for the rest, and takes any devices without an answer. Agent and
kubelet restart at any time. Not played is the moment after a restart of the kubelet in which the
plugin chooses, because no agent has registered again (``docs/design/device-truth.md``).

    python -m tests.model --worlds 5000 --seed 1000
"""

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Literal

from agent.gate_decision import Limits
from agent.probes.checkpoint import Entry
from agent.steering.choice import Choice, NoRoom, OnlyCordoned
from agent.steering.choice import choose as real_choose
from agent.steering.messages import ContainerRequest
from headroom.contract.gpunode import GPUNodeSpec, GPUNodeStatus, Plugin, Reservation
from headroom.contract.kube import Pod
from headroom.core.placement.fit import fit
from headroom.core.placement.placement_record import place
from headroom.core.placement.snapshot import NodeTerms
from headroom.core.placement.snapshot_builder import build
from tests.builders import (
    FRESH_S,
    GIB,
    GPU,
    NOW_S,
    container,
    pod,
    request,
    shared,
    status,
    terms,
    use,
)

#: Memory of one container on each of its devices: GiB, percent of a device, or a replica's share.
Amount = tuple[str, int]


@dataclass(frozen=True)
class Container:
    name: str
    devices: int
    amount: Amount
    init: bool = False


@dataclass
class Job:
    """A pod, and the replicas that its containers hold in the kubelet."""

    uid: str
    containers: tuple[Container, ...]
    pod: Pod
    held: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: Whether Headroom chose the devices. Otherwise the plugin may give one device twice.
    chosen: bool = True
    #: The devices that the pod's annotation names, if Headroom chose them.
    choices: frozenset[str] = frozenset()
    #: Whether the agent may use other devices, because pods that it had forgotten, or pods bound
    #: without steering, could be unconfirmed too.
    misplaced: bool = False
    #: The pod uses this percentage of its request.
    used_percent: int = 0

    @property
    def replicas(self) -> set[str]:
        return {replica for some in self.held.values() for replica in some}


def gpu_of(replica: str) -> str:
    return replica.split("::")[0]


Choose = Callable[..., Choice | NoRoom | OnlyCordoned]


@dataclass(frozen=True)
class Node:
    """The devices of a node, and how its plugin and its kubelet choose."""

    replicas: int
    #: Memory of each device in GiB.
    gib: Mapping[str, int]
    #: The memory of each device. MIG compute instances share the memory of their GPU instance.
    memory_of: Mapping[str, int]
    numa_of: Mapping[str, int]
    topology: str = "none"
    policy: Literal["distributed", "packed"] = "distributed"

    @property
    def mig(self) -> bool:
        return len(set(self.memory_of.values())) < len(self.memory_of)

    @classmethod
    def drawn(cls, lots: Random) -> "Node":
        gpus = lots.choice([1, 2, 2, 3, 4, 4, 8])
        replicas = lots.choice([2, 3, 4, 6])
        sizes = lots.choice([[24], [24], [24, 48]])
        mates = lots.choice([1, 1, 1, 2])
        memory_of = {f"G{i}": i // mates for i in range(gpus)}
        memories = [lots.choice(sizes) for _ in range(gpus)]
        policies = "none", "none", "none", "best-effort", "restricted", "single-numa-node"
        topology = lots.choice(policies)
        # With a topology policy, all devices must be on one NUMA node, or they are not steered.
        numa_nodes = lots.choice([1, 2]) if topology == "none" else 1
        return cls(
            replicas,
            {uuid: memories[memory] for uuid, memory in memory_of.items()},
            memory_of,
            {uuid: i * numa_nodes // gpus for i, uuid in enumerate(memory_of)},
            topology,
            "distributed" if lots.random() < 0.5 else "packed",
        )

    @classmethod
    def of(cls, gpus: int, replicas: int) -> "Node":
        """Return a node with equal GPUs of 24 GiB."""
        uuids = [f"G{i}" for i in range(gpus)]
        memory_of = {uuid: i for i, uuid in enumerate(uuids)}
        return cls(replicas, dict.fromkeys(uuids, 24), memory_of, dict.fromkeys(uuids, 0))


class World:
    """A node with its pods. If it ``toggles``, steering begins and ends at any time.

    ``choose`` is the agent's choice.
    """

    def __init__(
        self, node: Node, lots: Random, toggles: bool = False, choose: Choose = real_choose
    ) -> None:
        self.node, self.lots = node, lots
        self.toggles, self.steered, self.choose = toggles, True, choose
        self.jobs: dict[str, Job] = {}
        self.bound: list[str] = []
        self.entries: list[Entry] = []
        self.reservations: dict[str, Reservation] = {}
        #: Pods that have had devices, which the agent remembers.
        self.arrived: set[str] = set()
        #: Whether the agent may have forgotten pods that ended while their reservations remain, and
        #: whether it has taken no sample since then.
        self.forgetful = self.blind = False
        #: Placements, answers and rejections, for a check that worlds are not empty.
        self.counts: Counter[str] = Counter()
        self._number = count()
        self.told = self.sample()

    def copy(self) -> "World":
        made = copy.copy(self)
        made.jobs = {uid: replace(job, held=dict(job.held)) for uid, job in self.jobs.items()}
        made.bound, made.entries = list(self.bound), list(self.entries)
        made.reservations, made.arrived = dict(self.reservations), set(self.arrived)
        made.counts = Counter(self.counts)
        return made

    # The real state, as the kubelet and the judge see it.

    def free(self) -> list[str]:
        taken = {replica for job in self.jobs.values() for replica in job.replicas}
        every = (f"{uuid}::{n}" for uuid in self.node.gib for n in range(self.node.replicas))
        return [replica for replica in every if replica not in taken]

    def problems(self) -> list[str]:
        """Judge the containers that run: too much memory, one device twice, company on a device
        that a pod takes alone."""
        found: list[str] = []
        taken: Counter[int] = Counter()
        on: dict[str, list[str]] = {uuid: [] for uuid in self.node.gib}
        alone: dict[str, str] = {}
        for job in self.jobs.values():
            for each in job.containers:
                if each.name not in job.held:
                    continue
                gpus = [gpu_of(replica) for replica in job.held[each.name]]
                if not job.chosen:
                    continue
                if len(set(gpus)) != each.devices:
                    found.append(f"{job.uid}/{each.name} wants {each.devices} devices: {gpus}")
                if not job.choices.issuperset(gpus) and not job.misplaced:
                    found.append(f"{job.uid}/{each.name} should be on {job.choices}: {gpus}")
                if each.amount == ("percent", 100):
                    alone.update((uuid, job.uid) for uuid in gpus)
            for uuid in {gpu_of(replica) for replica in job.replicas}:
                on[uuid].append(job.uid)
            for memory in set(self.node.memory_of.values()):
                inits, apps = [0], 0
                for each in job.containers:
                    there = {gpu_of(replica) for replica in job.held.get(each.name, ())}
                    size = sum(
                        self._bytes(each, uuid)
                        for uuid in there
                        if self.node.memory_of[uuid] == memory
                    )
                    if each.init:
                        inits.append(size)
                    else:
                        apps += size
                taken[memory] += max(*inits, apps)
        for uuid, gib in self.node.gib.items():
            if taken[self.node.memory_of[uuid]] > gib * GIB:
                found.append(f"{uuid} is overcommitted: {taken[self.node.memory_of[uuid]]} bytes")
            if uuid in alone and len(on[uuid]) > 1:
                found.append(f"{alone[uuid]} should be alone on {uuid}: {on[uuid]}")
        return found

    def _bytes(self, each: Container, uuid: str) -> int:
        kind, number = each.amount
        whole = self.node.gib[uuid] * GIB
        if kind == "gib":
            return number * GIB
        return whole * number // 100 if kind == "percent" else whole // self.node.replicas

    def _used(self, job: Job, each: Container, replica: str) -> int:
        """Return the bytes that a container uses, on its first replica of each device.

        Init containers have ended.
        """
        uuid = gpu_of(replica)
        first = next(other for other in job.held[each.name] if gpu_of(other) == uuid)
        if each.init or replica != first:
            return 0
        return self._bytes(each, uuid) * job.used_percent // 100

    # The values that the agent reports.

    def sample(self) -> GPUNodeStatus:
        rows = [
            use(
                job.uid,
                gpu_of(replica),
                self._used(job, each, replica),
                container=each.name,
                replica=replica,
            )
            for job in self.jobs.values()
            for each in job.containers
            for replica in job.held.get(each.name, ())
        ]
        used = Counter[int]()
        for row in rows:
            used[self.node.memory_of[row.device]] += row.used_bytes or 0
        taken = Counter(gpu_of(r) for job in self.jobs.values() for r in job.replicas)
        devices = [
            shared(
                uuid,
                free=self.node.replicas - taken[uuid],
                allocated=taken[uuid],
                memory_bytes=gib * GIB,
                used_bytes=used[self.node.memory_of[uuid]],
                numa_node=self.node.numa_of[uuid],
                kind="mig" if self.node.mig else "gpu",
                parent="GPU" if self.node.mig else None,
                gpu_instance=self.node.memory_of[uuid] if self.node.mig else None,
            )
            for uuid, gib in self.node.gib.items()
        ]
        plugin = Plugin(
            allocation_policy=self.node.policy,
            topology_manager_policy=self.node.topology,
            fail_requests_greater_than_one=False,
            steered=[GPU] if self.steered else [],
            steers_several=self.steered,
        )
        return status(*devices, pods=rows, plugin=plugin)

    def report(self) -> None:
        if self.toggles and self.lots.random() < 0.3:
            self.steered = not self.steered
        self.told = self.sample()
        self.arrived |= {row.uid for row in self.told.pods}
        self.blind = False

    def restart_agent(self) -> None:
        """The new agent takes a sample before it answers the kubelet."""
        self.arrived, self.forgetful = set(), True
        self.report()
        self.counts["restarts of the agent"] += 1

    def restart_kubelet(self) -> None:
        """Running containers keep their devices. The agent forgets which pods have had devices."""
        self.arrived, self.forgetful, self.blind = set(), True, True
        self.counts["restarts of the kubelet"] += 1

    # The extender.

    def collect(self) -> None:
        """Remove the reservations of pods that are gone, after a report without them."""
        shown = {row.uid for row in self.told.pods}
        self.reservations = {
            u: r for u, r in self.reservations.items() if u in self.jobs or u in shown
        }
        self.forgetful &= self.blind or not self.reservations.keys() <= self.jobs.keys()

    def new_job(self) -> Job:
        lots, uid = self.lots, f"u{next(self._number)}"
        wide = lots.choice([1, 1, 1, 2, 2, 3, 4, 8])
        made: list[Container] = []
        for i in range(lots.choice([1, 1, 1, 1, 2, 3])):
            devices = wide if i == 0 else lots.randint(1, wide)
            init = i > 0 and lots.random() < 0.5
            made.append(Container(f"c{i}", devices, self._amount(), init))
        if all(each.amount[0] == "replica" for each in made):
            vram = None
        else:
            made = [
                each if each.amount[0] != "replica" else _with_amount(each, ("gib", 1))
                for each in made
            ]
            vram = ",".join(f"{each.name}={_text(each.amount)}" for each in made)
        inits = [container(each.name, each.devices) for each in made if each.init]
        apps = [container(each.name, each.devices) for each in made if not each.init]
        lots.shuffle(inits)
        asks = pod(vram, *apps, init=inits, uid=uid, name=uid)
        return Job(uid, tuple(made), asks, used_percent=lots.choice([0, 0, 50, 100]))

    def _amount(self) -> Amount:
        kind = self.lots.choice(["gib", "gib", "gib", "percent", "whole", "replica"])
        if kind == "whole":
            return "percent", 100
        if kind == "percent":
            return "percent", self.lots.choice([10, 25, 50, 75])
        return kind, self.lots.choice([1, 4, 8, 12, 16, 20])

    def bind(self, job: Job) -> bool:
        """Bind the pod if it fits, as the extender does."""
        gone = {row.uid for row in self.told.pods} - self.jobs.keys()
        node = NodeTerms(
            "n",
            None,
            FRESH_S,
            terms(
                *self.told.devices,
                pods=self.told.pods,
                reservations=self.reservations,
                plugin=self.told.plugin,
                leaving=gone,
            ),
        )
        what, snap = request(job.pod), build([node])
        verdicts = fit(what, snap, snap.rows(["n"]), NOW_S)
        widest = max(each.devices for each in job.containers)
        if not verdicts.fits[0]:
            self.counts["waits"] += 1
            return False
        placement = place(what, snap, verdicts, 0)
        self.counts[f"{widest} devices"] += 1
        self.counts["alone"] += any(each.amount == ("percent", 100) for each in job.containers)
        self.reservations[job.uid] = Reservation("default", job.uid, list(placement.charges))
        job.choices = frozenset(uuid for each in placement.charges for uuid in each.choices)
        job.chosen = all(charge.choices for charge in placement.charges)
        self.counts["predicted"] += not job.chosen
        self.jobs[job.uid] = job
        self.bound.append(job.uid)
        return True

    # The kubelet.

    def admit(self, uid: str) -> None:
        """Allocate devices for every container of the pod. The pod is gone if it is rejected."""
        self.bound.remove(uid)
        job = self.jobs[uid]
        job.misplaced = self.forgetful or self.toggles or self.predicted()
        order = [c.name for c in (*(job.pod.spec.init_containers or ()), *job.pod.spec.containers)]
        of = {each.name: each for each in job.containers}
        self.entries = [entry for entry in self.entries if entry.pod_uid in self.jobs]
        reusable: set[str] = set()
        for name in order:
            given = self._allocate(of[name].devices, reusable)
            if given is None:
                # After a restart, a pod that has ended can count as unconfirmed.
                self.counts["rejected after a restart" if self.forgetful else "rejected"] += 1
                del self.jobs[uid]
                return
            job.held[name] = tuple(given)
            self.entries.append(Entry(uid, name, GPU, tuple(given)))
            reusable = reusable | set(given) if of[name].init else reusable - set(given)

    def _allocate(self, needed: int, reusable: set[str]) -> list[str] | None:
        again = self.lots.sample(sorted(reusable), min(needed, len(reusable)))
        if len(again) == needed:
            return again
        available = self.free()
        if len(available) < needed - len(again):
            return None
        if self.node.topology != "none" and needed - len(again) >= len(available):
            return [*again, *available]
        asked = ContainerRequest((*available, *again), tuple(again), needed)
        self.lots.shuffle(available)
        sample = self.sample() if self.lots.random() < 0.3 else self.told
        spec = GPUNodeSpec(True, self.reservations)
        seen = self.arrived | {entry.pod_uid for entry in self.entries}
        limits = Limits(0, 0)
        steered = GPU in self.told.plugin.steered
        found = self.choose(asked, GPU, spec, sample, self.entries, limits, steered, seen)
        if not isinstance(found, Choice):
            return None
        self.counts["answers"] += 1
        preferred = [replica for replica in found.replicas if replica in available]
        if not found.replicas:
            preferred = self._plugins_choice(available, needed - len(again))
        chosen = (preferred + [r for r in available if r not in preferred])[: needed - len(again)]
        return [*again, *chosen]

    def _plugins_choice(self, available: list[str], count: int) -> list[str]:
        """Choose as NVIDIA's plugin does: the device with the fewest or the most replicas in use,
        and among equal devices the one that was chosen less often for this container."""
        free = Counter(map(gpu_of, available))
        chosen: list[str] = []
        sign = 1 if self.node.policy == "distributed" else -1
        left = list(available)
        for _ in range(count):
            picked = Counter(map(gpu_of, chosen))
            self.lots.shuffle(left)
            best = min(
                left,
                key=lambda replica: (
                    sign * (self.node.replicas - free[gpu_of(replica)] + picked[gpu_of(replica)]),
                    picked[gpu_of(replica)],
                ),
            )
            left.remove(best)
            chosen.append(best)
        return chosen

    def predicted(self) -> bool:
        """Return whether an unconfirmed pod depends on a prediction, which freed replicas
        change."""
        return any(not self.jobs[uid].chosen for uid in self.bound)

    def step(self) -> None:
        lots = self.lots
        match lots.choice("bbbbbaaaaaarrrrccccdeeexy"):
            case "b":
                self.bind(self.new_job())
            case "a" if self.bound:
                self.admit(lots.choice(self.bound))
            case "r":
                self.report()
            case "c":
                self.collect()
            case "d" if self.bound and not self.predicted():  # deleted before the kubelet admits it
                uid = lots.choice(self.bound)
                self.bound.remove(uid)
                del self.jobs[uid]
            case "e" if not self.predicted():
                running = [uid for uid, job in self.jobs.items() if job.held]
                if running:
                    del self.jobs[lots.choice(running)]
            case "x":
                self.restart_agent()
            case "y":
                self.restart_kubelet()


def _with_amount(each: Container, amount: Amount) -> Container:
    return Container(each.name, each.devices, amount, each.init)


def _text(amount: Amount) -> str:
    kind, number = amount
    return f"{number}Gi" if kind == "gib" else f"{number}%"


def run(seed: int, toggles: bool = False, steps: int = 100) -> tuple[list[str], Counter[str]]:
    """Return the problems of one world and its counts."""
    lots = Random(seed)
    world = World(Node.drawn(lots), lots, toggles)
    for _ in range(steps):
        world.step()
        if found := world.problems():
            return found, world.counts
    while world.bound:
        world.admit(world.bound[0])
        if found := world.problems():
            return found, world.counts
    return [], world.counts
