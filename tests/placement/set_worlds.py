"""Random steered nodes on which pods request several devices.

The extender's placement and the agent's choice are the product's. The kubelet and the account of
what each container got are written here, and use nothing of the product: the kubelet reuses the
devices of init containers, asks the agent for the rest, and takes any devices without an answer.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from random import Random

from agent.gate_decision import Limits
from agent.probes.checkpoint import Entry
from agent.steering.choice import Choice, choose
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

    @property
    def replicas(self) -> set[str]:
        return {replica for some in self.held.values() for replica in some}


def gpu_of(replica: str) -> str:
    return replica.split("::")[0]


class World:
    """One node. If it ``toggles``, steering begins and ends at any time."""

    def __init__(self, seed: int, toggles: bool = False) -> None:
        self.toggles, self.steered = toggles, True
        self.lots = lots = Random(seed)
        gpus = lots.choice([1, 2, 2, 3, 4, 4, 8])
        self.replicas = lots.choice([2, 3, 4, 6])
        sizes = lots.choice([[24], [24], [24, 48]])
        #: Memory of each device. MIG compute instances share the memory of their GPU instance.
        mates = lots.choice([1, 1, 1, 2])
        self.memory_of = {f"G{i}": i // mates for i in range(gpus)}
        memories = [lots.choice(sizes) for _ in range(gpus)]
        self.gib = {uuid: memories[memory] for uuid, memory in self.memory_of.items()}
        self.mig = mates > 1
        self.topology = lots.choice(["none", "none", "best-effort", "restricted"])
        #: With a topology policy, all devices must be on one NUMA node, or they are not steered.
        numa_nodes = lots.choice([1, 2]) if self.topology == "none" else 1
        self.numa_of = {uuid: i * numa_nodes // gpus for i, uuid in enumerate(self.gib)}
        self.policy = lots.choice(["distributed", "packed"])
        self.jobs: dict[str, Job] = {}
        self.bound: list[str] = []
        self.entries: list[Entry] = []
        self.reservations: dict[str, Reservation] = {}
        #: Pods that have had devices, which the agent remembers.
        self.arrived: set[str] = set()
        #: Placements, answers and rejections, for a check that worlds are not empty.
        self.counts: Counter[str] = Counter()
        self._number = count()
        self.told = self.sample()

    # The real state, as the kubelet and the judge see it.

    def free(self) -> list[str]:
        taken = {replica for job in self.jobs.values() for replica in job.replicas}
        every = (f"{uuid}::{n}" for uuid in self.gib for n in range(self.replicas))
        return [replica for replica in every if replica not in taken]

    def problems(self) -> list[str]:
        """Judge the containers that run: too much memory, one device twice, company on a device
        that a pod takes alone."""
        found: list[str] = []
        taken: Counter[int] = Counter()
        on: dict[str, list[str]] = {uuid: [] for uuid in self.gib}
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
                if each.amount == ("percent", 100):
                    alone.update((uuid, job.uid) for uuid in gpus)
            for uuid in {gpu_of(replica) for replica in job.replicas}:
                on[uuid].append(job.uid)
            for memory in set(self.memory_of.values()):
                inits, apps = [0], 0
                for each in job.containers:
                    there = {gpu_of(replica) for replica in job.held.get(each.name, ())}
                    size = sum(self._bytes(each, u) for u in there if self.memory_of[u] == memory)
                    if each.init:
                        inits.append(size)
                    else:
                        apps += size
                taken[memory] += max(*inits, apps)
        for uuid, gib in self.gib.items():
            if taken[self.memory_of[uuid]] > gib * GIB:
                found.append(f"{uuid} is overcommitted: {taken[self.memory_of[uuid]]} bytes")
            if uuid in alone and len(on[uuid]) > 1:
                found.append(f"{alone[uuid]} should be alone on {uuid}: {on[uuid]}")
        return found

    def _bytes(self, each: Container, uuid: str) -> int:
        kind, number = each.amount
        whole = self.gib[uuid] * GIB
        if kind == "gib":
            return number * GIB
        return whole * number // 100 if kind == "percent" else whole // self.replicas

    # The values that the agent reports.

    def sample(self) -> GPUNodeStatus:
        rows = [
            use(job.uid, gpu_of(replica), 0, container=name, replica=replica)
            for job in self.jobs.values()
            for name, some in job.held.items()
            for replica in some
        ]
        taken = Counter(gpu_of(r) for job in self.jobs.values() for r in job.replicas)
        devices = [
            shared(
                uuid,
                free=self.replicas - taken[uuid],
                allocated=taken[uuid],
                memory_bytes=gib * GIB,
                numa_node=self.numa_of[uuid],
                kind="mig" if self.mig else "gpu",
                parent="GPU" if self.mig else None,
                gpu_instance=self.memory_of[uuid] if self.mig else None,
            )
            for uuid, gib in self.gib.items()
        ]
        plugin = Plugin(
            allocation_policy="distributed" if self.policy == "distributed" else "packed",
            topology_manager_policy=self.topology,
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
        self.reservations = {u: r for u, r in self.reservations.items() if u in self.jobs}

    # The extender.

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
        return Job(uid, tuple(made), pod(vram, *apps, init=inits, uid=uid, name=uid))

    def _amount(self) -> Amount:
        kind = self.lots.choice(["gib", "gib", "gib", "percent", "whole", "replica"])
        if kind == "whole":
            return "percent", 100
        if kind == "percent":
            return "percent", self.lots.choice([10, 25, 50, 75])
        return kind, self.lots.choice([1, 4, 8, 12, 16, 20])

    def bind(self) -> None:
        job = self.new_job()
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
            return
        placement = place(what, snap, verdicts, 0)
        self.counts[f"{widest} devices"] += 1
        self.counts["alone"] += any(each.amount == ("percent", 100) for each in job.containers)
        self.reservations[job.uid] = Reservation("default", job.uid, list(placement.charges))
        job.chosen = all(charge.choices for charge in placement.charges)
        self.counts["predicted"] += not job.chosen
        self.jobs[job.uid] = job
        self.bound.append(job.uid)

    # The kubelet.

    def admit(self) -> None:
        if not self.bound:
            return
        uid = self.bound.pop(self.lots.randrange(len(self.bound)))
        job = self.jobs[uid]
        order = [c.name for c in (*(job.pod.spec.init_containers or ()), *job.pod.spec.containers)]
        of = {each.name: each for each in job.containers}
        self.entries = [entry for entry in self.entries if entry.pod_uid in self.jobs]
        reusable: set[str] = set()
        for name in order:
            given = self._allocate(of[name].devices, reusable)
            if given is None:
                self.counts["rejected"] += 1
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
        if self.topology != "none" and needed - len(again) >= len(available):
            return [*again, *available]
        asked = ContainerRequest((*available, *again), tuple(again), needed)
        self.lots.shuffle(available)
        sample = self.sample() if self.lots.random() < 0.3 else self.told
        spec = GPUNodeSpec(True, self.reservations)
        seen = self.arrived | {entry.pod_uid for entry in self.entries}
        limits = Limits(0, 0)
        steered = GPU in self.told.plugin.steered
        found = choose(asked, GPU, spec, sample, self.entries, limits, steered, seen)
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
        sign = 1 if self.policy == "distributed" else -1
        left = list(available)
        for _ in range(count):
            picked = Counter(map(gpu_of, chosen))
            self.lots.shuffle(left)
            best = min(
                left,
                key=lambda replica: (
                    sign * (self.replicas - free[gpu_of(replica)] + picked[gpu_of(replica)]),
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
        match self.lots.choice("bbbbaaarrde"):
            case "b":
                self.bind()
            case "a":
                self.admit()
            case "r":
                self.report()
            case "d" if self.bound and not self.predicted():  # deleted before the kubelet admits it
                del self.jobs[self.bound.pop(self.lots.randrange(len(self.bound)))]
            case "e" if not self.predicted():
                running = [uid for uid, job in self.jobs.items() if job.held]
                if running:
                    del self.jobs[self.lots.choice(running)]


def _with_amount(each: Container, amount: Amount) -> Container:
    return Container(each.name, each.devices, amount, each.init)


def _text(amount: Amount) -> str:
    kind, number = amount
    return f"{number}Gi" if kind == "gib" else f"{number}%"


def run(seed: int, toggles: bool = False, steps: int = 40) -> tuple[list[str], Counter[str]]:
    """Return the problems of one world and its counts."""
    world = World(seed, toggles)
    for _ in range(steps):
        world.step()
        if found := world.problems():
            return found, world.counts
    while world.bound:
        world.admit()
        if found := world.problems():
            return found, world.counts
    return [], world.counts
