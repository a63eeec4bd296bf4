"""Configurations to compare, and the replays that find how many GPUs each of them needs.

A configuration splits the pods into two pools, each with its own nodes. The *exclusive* pool has
unshared GPUs, for pods that need several GPUs or almost a whole GPU. The *shared* pool has all
other pods. For each pool, a search finds the fewest nodes with which its pods wait, on average, no
longer than on today's unshared cluster. With one pool, all pods are on shared, steered nodes, where
the pods of the exclusive pool get GPUs of their own. The limit of the waiting time then applies to
both kinds of pods.

Nodes are added in an order that keeps about today's mix of shapes for any number of nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headroom.planner.contention import NONE, Contention
from headroom.planner.demand import demand, gpus_of, mean_gpu_bytes
from headroom.planner.life_replay import Outcome, Replay
from headroom.planner.mig import split_by_mig
from headroom.planner.placers import ByCounting, ByHeadroom, Placer, Request
from headroom.planner.rhythm import Variation, variation
from headroom.planner.simulated_fleet import Sharing
from headroom.planner.workload import (
    History,
    Life,
    Machine,
    Vram,
    first_machines,
    largest_bytes,
    mixed_order,
    stays_exclusive,
)

#: A shorter mean waiting time counts as no waiting.
NO_WAIT_S = 5.0
#: The search ends when the number of nodes is known to within 1 part in this many.
_RESOLUTION = 50
#: The search stops at today's nodes plus this multiple of the peak number of nodes in use when no
#: pod waits.
_MOST_TIMES = 4
_REQUESTS = Vram("requests")


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to run the cluster."""

    #: One of exclusive, counting, predicted, steered and mig.
    choice: str
    replicas: int
    vram: Vram
    #: With MIG, the profile of all instances, such as 1g.
    profile: str | None = None
    #: A GPU takes another pod only if its SM activity in percent is below this value. None means no
    #: limit.
    max_sm: int | None = None
    #: Whether pods that need GPUs of their own run on the shared nodes, too.
    one_pool: bool = False

    @property
    def text(self) -> str:
        match self.choice:
            case "exclusive":
                return "unshared"
            case "mig":
                return f"MIG {self.profile}"
            case "counting":
                return f"{self.replicas} replicas, counted only"
            case _:
                limit = "" if self.max_sm is None else f", max-sm {self.max_sm} %"
                pool = ", one pool" if self.one_pool else ""
                return f"{self.replicas} replicas, {self.choice}{pool}{limit}"


@dataclass(frozen=True, slots=True)
class Pool:
    """The fewest machines that suffice for some pods."""

    machines: tuple[Machine, ...]
    #: The replay on these machines.
    outcome: Outcome

    @property
    def gpus(self) -> int:
        return sum(machine.gpus for machine in self.machines)


#: A pod and the memory that it requests on each of its GPUs, which is None for whole GPUs.
_Need = tuple[Life, int | None]
_NO_POOL = Pool((), Outcome(0, (), 0, 0, 0.0, 0.0, 0, NONE))


@dataclass(frozen=True, slots=True)
class Answer:
    """The result for one configuration and one seed."""

    #: The pools that the pods need, or None if the pods wait longer than today with any number of
    #: nodes.
    needed: tuple[Pool, Pool] | None
    #: Mean waiting time on today's nodes, in seconds; None if the exclusive pods leave no node for
    #: the sharing pods.
    today_wait_s: float | None
    #: Number of pods that run out of memory on today's nodes.
    today_out_of_memory: int

    @property
    def gpus(self) -> int | None:
        return None if self.needed is None else sum(pool.gpus for pool in self.needed)

    @property
    def machines(self) -> tuple[Machine, ...]:
        return () if self.needed is None else self.needed[0].machines + self.needed[1].machines

    @property
    def out_of_memory(self) -> int:
        return sum(pool.outcome.out_of_memory for pool in self.needed or ())

    def ratio(self, of: Callable[[Outcome], float], size: Callable[[Machine], int]) -> float:
        """Return the mean of a ratio over both pools, weighted by the size of their machines."""
        weighed = [(sum(map(size, pool.machines)), of(pool.outcome)) for pool in self.needed or ()]
        total = sum(weight for weight, _ in weighed)
        return sum(weight * ratio for weight, ratio in weighed) / total if total else 0.0

    @property
    def contention(self) -> Contention:
        """Contention of the pods that share GPUs."""
        return self.needed[1].outcome.contention if self.needed else NONE

    @property
    def memory_ratio(self) -> float:
        """Fraction of the GPU memory that is in use."""
        return self.ratio(lambda o: o.memory_ratio, lambda m: m.devices * m.memory_bytes)

    @property
    def sm_ratio(self) -> float:
        """Mean of the summed SM activity per GPU."""
        return self.ratio(lambda o: o.sm_ratio, lambda m: m.gpus)


@dataclass(frozen=True, slots=True)
class Baseline:
    """Today's cluster with unshared GPUs, for one seed."""

    #: Mean waiting time on today's nodes, in seconds.
    wait_s: float
    #: Maximum mean waiting time that counts as unchanged.
    target_s: float


def baseline(history: History, lives: Sequence[Life], seed: int) -> Baseline:
    """Replay today's cluster with unshared GPUs."""
    machines = mixed_order(history.machines)
    shapes = shapes_of(machines)
    fitting = [life for life in lives if has_machine(life, None, shapes)]
    today = _exclusive(fitting, machines, seed).run()
    assert today is not None, "without a limit the replay ends"
    target_s = max(NO_WAIT_S, today.mean_wait_s)
    return Baseline(today.mean_wait_s, target_s)


def unshared_pool(
    history: History, lives: Sequence[Life], seed: int, today: Baseline
) -> Pool | None:
    """Return the fewest unshared nodes for all pods, or None if no number suffices."""
    machines = mixed_order(history.machines)
    shapes = shapes_of(machines)
    fitting = [life for life in lives if has_machine(life, None, shapes)]
    return _fewest_exclusive(fitting, machines, seed, today.target_s)


def exclusive_pool(
    history: History,
    lives: Sequence[Life],
    configuration: Configuration,
    seed: int,
    today: Baseline,
) -> Pool | None:
    """Return the fewest unshared nodes for the pods that stay exclusive in this configuration. With
    one pool, there are no such nodes."""
    if configuration.one_pool:
        return _NO_POOL
    machines = mixed_order(history.machines)
    stay, _ = split(lives, machines, configuration)
    return _fewest_exclusive(stay, machines, seed, today.target_s)


def answer(
    history: History,
    lives: Sequence[Life],
    configuration: Configuration,
    seed: int,
    today: Baseline,
    exclusive: Pool | None,
) -> Answer:
    """Return the answer of a configuration with shared GPUs.

    ``exclusive`` is its exclusive pool, or None if no number of nodes suffices.
    """
    today_machines = mixed_order(history.machines)
    machines = shared_machines(today_machines, configuration)
    vram = configuration.vram
    stay, share = split(lives, today_machines, configuration)
    sharing = Sharing(configuration.replicas, configuration.choice == "steered")
    by = ByCounting if configuration.choice == "counting" else ByHeadroom
    needs = [(life, vram.need_bytes(life)) for life in share]
    if configuration.one_pool:
        needs += [(life, None) for life in stay]
        needs.sort(key=lambda need: need[0].created_s)
        share = [life for life, _ in needs]
    requests = [
        _request(life, need_bytes, configuration.max_sm if need_bytes else None)
        for life, need_bytes in needs
    ]

    def replay(some: Sequence[Machine]) -> Replay:
        placer: Placer = by(some, sharing, seed)
        return Replay(share, requests, some, placer)

    pool = None
    if exclusive is not None:
        pool = _fewest(replay, needs, machines, sharing.replicas, vram, today.target_s)
    kept = 0 if exclusive is None else len(exclusive.machines)
    left = shared_machines(today_machines[kept:], configuration)
    wait_s, out_of_memory = None, 0
    if exclusive is not None and (left or not share):
        rest = replay(left).run() if share else None
        waits = [(exclusive.outcome.pods, exclusive.outcome.mean_wait_s)]
        if rest is not None:
            waits.append((rest.pods, rest.mean_wait_s))
            out_of_memory = rest.out_of_memory
        wait_s = sum(pods * each_s for pods, each_s in waits) / max(1, sum(p for p, _ in waits))
    needed = None if exclusive is None or pool is None else (exclusive, pool)
    return Answer(needed, wait_s, out_of_memory)


def shared_machines(machines: Sequence[Machine], configuration: Configuration) -> list[Machine]:
    """Return the machines as they are in the shared pool. With MIG, return only the machines that
    support it, with their GPUs split into instances."""
    if configuration.profile is None:
        return list(machines)
    return split_by_mig(machines, configuration.profile)


class Pools:
    """Decides for each pod whether it shares GPUs in a configuration."""

    def __init__(self, machines: Sequence[Machine], configuration: Configuration) -> None:
        self._vram, self._mig = configuration.vram, configuration.profile is not None
        self._sizes, self._shapes = largest_bytes(machines), shapes_of(machines)
        self._shared = shapes_of(shared_machines(machines, configuration))

    def shares(self, life: Life) -> bool | None:
        """Return whether the pod shares GPUs, or None if it is too large for every machine."""
        need_bytes = self._vram.need_bytes(life)
        if self._mig:
            stays = self._vram.largest(life).gpus > 1 or need_bytes is None
            stays = stays or not has_machine(life, need_bytes, self._shared)
        else:
            stays = stays_exclusive(life, self._vram, self._sizes)
        if stays:
            return False if has_machine(life, None, self._shapes) else None
        return True if has_machine(life, need_bytes, self._shared) else None


def split(
    lives: Sequence[Life], machines: Sequence[Machine], configuration: Configuration
) -> tuple[list[Life], list[Life]]:
    """Return the pods that keep GPUs of their own, and the pods that share GPUs. Pods that are too
    large for every machine are in neither."""
    pools = Pools(machines, configuration)
    found = [(life, pools.shares(life)) for life in lives]
    return [life for life, shares in found if shares is False], [life for life, s in found if s]


def variation_of(history: History, configuration: Configuration) -> Variation:
    """Return how much the need varies in this configuration."""
    pools = Pools(history.machines, configuration)
    shared = shared_machines(history.machines, configuration)
    mean_bytes = mean_gpu_bytes(history.machines)
    instances = sum(each.devices for each in shared) / max(1, sum(each.gpus for each in shared))
    gpus: list[float] = []
    for life in history.lives:
        shares = pools.shares(life)
        if not shares:
            gpus.append(0.0 if shares is None else float(life.gpus))
        elif configuration.profile is not None:
            gpus.append(1 / instances)
        else:
            gpus.append(gpus_of(life, configuration.vram, configuration.replicas, mean_bytes))
    return variation(history, gpus)


def _request(life: Life, need_bytes: int | None, max_sm: int | None = None) -> Request:
    least_bytes = max(life.known_bytes or 0, need_bytes or 0)
    return Request(
        life.gpus,
        need_bytes,
        life.models,
        life.cpu_milli,
        life.host_bytes,
        least_bytes,
        max_sm,
    )


def has_machine(life: Life, need_bytes: int | None, machines: Sequence[Machine]) -> bool:
    """Return whether the pod fits on one of the machines if it is idle. ``need_bytes`` is None for
    whole GPUs."""
    least_bytes = max(life.known_bytes or 0, need_bytes or 0)
    return any(
        machine.gpus >= life.gpus
        and machine.memory_bytes >= least_bytes
        and (not life.models or machine.model in life.models)
        and (machine.cpu_milli is None or machine.cpu_milli >= life.cpu_milli)
        and (machine.host_bytes is None or machine.host_bytes >= life.host_bytes)
        for machine in machines
    )


def shapes_of(machines: Sequence[Machine]) -> list[Machine]:
    """Return one machine of each shape."""
    return list({replace(machine, name=""): machine for machine in machines}.values())


def _exclusive(lives: Sequence[Life], machines: Sequence[Machine], seed: int) -> Replay:
    requests = [_request(life, None) for life in lives]
    return Replay(lives, requests, machines, ByHeadroom(machines, Sharing(), seed))


def _fewest_exclusive(
    lives: Sequence[Life], machines: Sequence[Machine], seed: int, target_s: float
) -> Pool | None:
    def replay(some: Sequence[Machine]) -> Replay:
        return _exclusive(lives, some, seed)

    return _fewest(replay, [(life, None) for life in lives], machines, 1, None, target_s)


def _fewest(
    replay: Callable[[Sequence[Machine]], Replay],
    needs: Sequence[_Need],
    ordered: Sequence[Machine],
    replicas: int,
    vram: Vram | None,
    target_s: float,
) -> Pool | None:
    """Return the fewest machines, in the given order, with which the pods wait at most ``target_s``
    on average, or None if no number of machines suffices.

    ``vram`` is None if all pods get whole GPUs.
    """
    if not needs:
        return _NO_POOL
    # Count devices, because with MIG an instance takes one pod.
    size = sum(machine.devices for machine in ordered) / len(ordered)
    lives = [life for life, _ in needs]
    most, mean = demand(lives, replicas, vram or _REQUESTS, mean_gpu_bytes(ordered))
    widest, found = _widest(needs), dict[int, Outcome]()

    def suffices(count: int) -> bool:
        machines = first_machines(ordered, count)
        shapes = shapes_of(machines)
        if not all(has_machine(life, need_bytes, shapes) for life, need_bytes in widest):
            return False
        outcome = replay(machines).run(target_s)
        if outcome is None or outcome.never_ran or max(outcome.mean_waits_s) > target_s:
            return False
        found[count] = outcome
        return True

    # Waiting flattens the demand, so far fewer nodes than at its maximum may suffice.
    low, high = max(0, int(0.5 * mean / size) - 1), max(1, round(most / size))
    limit = _MOST_TIMES * high + len(ordered)
    while not suffices(high):
        if high >= limit:
            return None
        low, high = high, min(limit, high + max(1, high // 4))
    while high - low > max(1, high // _RESOLUTION):
        middle = (low + high) // 2
        if suffices(middle):
            high = middle
        else:
            low = middle
    return Pool(tuple(first_machines(ordered, high)), found[high])


def _widest(needs: Sequence[_Need]) -> list[_Need]:
    """Return the pod that needs the most memory for each number of GPUs and set of models."""
    found: dict[tuple[int, frozenset[str]], tuple[int, _Need]] = {}
    for life, need_bytes in needs:
        key = life.gpus, life.models
        least_bytes = max(life.known_bytes or 0, need_bytes or 0)
        if key not in found or found[key][0] < least_bytes:
            found[key] = least_bytes, (life, need_bytes)
    return [need for _, need in found.values()]
