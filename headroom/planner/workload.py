"""The values of a plan: machines of a cluster, lives of its pods, and the memory that they need."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

GIB = 1 << 30
#: Needs that come from peaks are rounded up to this step, so that there are few kinds of requests.
STEP_BYTES = 256 << 20
#: A pod that needs more than this ratio of the largest GPU that it may use keeps its own GPU.
EXCLUSIVE_ABOVE = 0.8
DAY_S = 86_400.0
_HASHES = re.compile(r"-[0-9a-f]{6,10}$|-\d{5,}$")


@dataclass(frozen=True, slots=True)
class Machine:
    """A node whose GPUs are all equal."""

    name: str
    model: str
    gpus: int
    #: Memory of each device that pods can use.
    memory_bytes: int
    #: Amounts that pods can request on the node; None if unknown, which means no limit.
    cpu_milli: int | None = None
    host_bytes: int | None = None
    #: MIG instances of each GPU; 1 without MIG. A device is an instance or a whole GPU.
    instances: int = 1
    #: Ratio of a GPU's SMs that a device has.
    sm_share: float = 1.0

    @property
    def devices(self) -> int:
        return self.gpus * self.instances


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest figures of any pod of a workload. All pods of a workload have one template, and
    so one request of GPU memory."""

    pods: int
    gpus: int
    #: The largest request of a pod, or None if a pod requests a whole GPU.
    request_bytes: int | None
    #: The largest peak of a pod, or None if no pod has a measured peak.
    peak_bytes: int | None
    #: GPU models that each of its pods may use; empty means any model.
    models: frozenset[str]


@dataclass(frozen=True, slots=True)
class Life:
    """One pod with a GPU, from its creation to its end."""

    name: str
    #: The name that all pods of the same owner share, such as a Deployment's name.
    workload: str
    #: When the pod was created, in seconds since the start of the history.
    created_s: float
    #: Time for which the pod ran, without the time for which it waited.
    run_s: float
    gpus: int
    #: GPU memory that the pod requests on one device, or None if it requests a whole device.
    request_bytes: int | None
    #: Maximum GPU memory that the pod used on one device, or None if unknown.
    peak_bytes: int | None = None
    #: The pod's mean SM activity from 0 to 1, or None if unknown.
    sm_ratio: float | None = None
    #: The pod's mean GPU utilization from 0 to 1, which is the fraction of time in which its
    #: kernels ran. None if unknown.
    utilization_ratio: float | None = None
    #: The request that Headroom would have recommended for the pod, or None if too little was
    #: known.
    recommended_bytes: int | None = None
    cpu_milli: int = 0
    host_bytes: int = 0
    #: GPU models that the pod may use. Empty means any model.
    models: frozenset[str] = frozenset()
    #: The largest figures of the pod's workload, or None if only the pod's own figures count.
    largest: Largest | None = None

    @property
    def known_bytes(self) -> int | None:
        """The GPU memory that the pod is assumed to use, or None if it uses a whole GPU.

        This is the pod's peak, otherwise the highest peak of its workload, otherwise its request.
        """
        if self.peak_bytes is not None:
            return self.peak_bytes
        if self.largest is not None and self.largest.peak_bytes is not None:
            return self.largest.peak_bytes
        return self.request_bytes

    @property
    def has_activity(self) -> bool:
        return self.sm_ratio is not None or self.utilization_ratio is not None

    @property
    def busy_ratio(self) -> float:
        """The ratio of a GPU's time that its kernels take if no other pod uses the GPU.

        With time-slicing, kernels of two pods never run together, even if they use few SMs.
        """
        if self.utilization_ratio is None:
            return self.sm_ratio or 0.0
        return self.utilization_ratio


@dataclass(frozen=True, slots=True)
class History:
    """The nodes of a cluster, and the pods that ran on them."""

    machines: tuple[Machine, ...]
    #: The lives in the order of their creation.
    lives: tuple[Life, ...]
    #: Sentences that state what the source of the history assumes.
    assumptions: tuple[str, ...]
    #: The nodes before the user added or removed some; None if they are unchanged.
    before: tuple[Machine, ...] | None = None
    #: Sentences about pods with a GPU that the source left out.
    skipped: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        return sum(machine.gpus for machine in self.machines)

    @property
    def has_workloads(self) -> bool:
        """Whether the history has names of workloads. Without them, the name of each pod counts."""
        alone = len({life.workload for life in self.lives}) == len(self.lives)
        return not alone or any(life.workload != life.name for life in self.lives)

    @property
    def span_s(self) -> float:
        """Time from the first creation to the last, at least one second."""
        return max(1.0, self.lives[-1].created_s - self.lives[0].created_s) if self.lives else 1.0

    @property
    def days(self) -> int:
        """Number of days that the history covers. A day that has only begun counts."""
        return int(self.span_s // DAY_S) + 1


@dataclass(frozen=True, slots=True)
class Vram:
    """The source of the GPU memory that pods request in a plan."""

    #: "requests" and "peaks" use the largest figure of all pods of the workload, because all get
    #: the same annotation. "pod-peaks" uses each pod's own peak, and "recommendations" the amount
    #: that Headroom recommended when the pod was created.
    source: str
    #: Margin that is added to a peak, as a ratio of the peak.
    margin_ratio: float = 0.0

    def largest(self, life: Life) -> Largest | Life:
        """Return the pod if its own figures decide the request, and otherwise its workload."""
        if life.largest is not None and self.source in ("requests", "peaks"):
            return life.largest
        return life

    def need_bytes(self, life: Life) -> int | None:
        """Return the GPU memory to request for the pod, or None for a whole GPU."""
        if self.source == "recommendations":
            return life.request_bytes if life.recommended_bytes is None else life.recommended_bytes
        found = self.largest(life)
        return self._request(found.peak_bytes, found.request_bytes)

    def own_bytes(self, life: Life) -> int | None:
        """Return the request that would be enough for this pod alone, or None for a whole GPU."""
        if self.source == "recommendations":
            return self.need_bytes(life)
        return self._request(life.peak_bytes, life.request_bytes)

    def _request(self, peak_bytes: int | None, request_bytes: int | None) -> int | None:
        if self.source == "requests" or peak_bytes is None:
            return request_bytes
        need_bytes = int(peak_bytes * (1 + self.margin_ratio))
        return max(1, -(-need_bytes // STEP_BYTES)) * STEP_BYTES

    @property
    def text(self) -> str:
        margin = f"+ {100 * self.margin_ratio:.0f} %"
        match self.source:
            case "peaks":
                return f"peaks {margin}"
            case "pod-peaks":
                return f"each pod's own peak {margin}"
            case _:
                return self.source


def with_workloads(history: History) -> History:
    """Return the history with ``Life.largest`` set for all pods."""
    pods_of: dict[str, list[Life]] = {}
    for life in history.lives:
        pods_of.setdefault(life.workload, []).append(life)
    largest = {name: _largest(pods) for name, pods in pods_of.items()}
    lives = (replace(life, largest=largest[life.workload]) for life in history.lives)
    return replace(history, lives=tuple(lives))


def _largest(pods: Sequence[Life]) -> Largest:
    peaks = [life.peak_bytes for life in pods if life.peak_bytes is not None]
    requests = [life.request_bytes for life in pods]
    return Largest(
        pods=len(pods),
        gpus=max(life.gpus for life in pods),
        request_bytes=None if None in requests else max(each for each in requests if each),
        peak_bytes=max(peaks, default=None),
        models=_common(life.models for life in pods),
    )


def workload_name(namespace: str, controller: str) -> str:
    """Return the name that all pods of a workload share. It is the name of their controller without
    the hash of a ReplicaSet or the time of a Job."""
    return f"{namespace}/{_HASHES.sub('', controller)}"


def largest_bytes(machines: Sequence[Machine]) -> Mapping[str, int]:
    """Return the memory of the largest GPU of each model."""
    found: dict[str, int] = {}
    for machine in machines:
        found[machine.model] = max(found.get(machine.model, 0), machine.memory_bytes)
    return found


def _common(models: Iterable[frozenset[str]]) -> frozenset[str]:
    """Return the models that occur in all sets. An empty set means any model and is ignored. If the
    sets have no model in common, return all models."""
    sets = [each for each in models if each]
    return frozenset.intersection(*sets) or frozenset.union(*sets) if sets else frozenset()


def stays_exclusive(life: Life, vram: Vram, sizes: Mapping[str, int]) -> bool:
    """Return whether the pod keeps GPUs of its own, because it requests several GPUs or almost a
    whole GPU.

    ``sizes`` maps each model to the memory of its largest GPU.
    """
    need_bytes = vram.need_bytes(life)
    if vram.largest(life).gpus != 1 or need_bytes is None:
        return True
    return need_bytes > EXCLUSIVE_ABOVE * gpu_bytes(life, vram, sizes)


def gpu_bytes(life: Life, vram: Vram, sizes: Mapping[str, int]) -> int:
    """Return the memory of the largest GPU that the pod, or each pod of its workload, may use, or 0
    if there is none."""
    models = vram.largest(life).models
    return max((size for model, size in sizes.items() if not models or model in models), default=0)


def mixed_order(machines: Sequence[Machine]) -> list[Machine]:
    """Return the machines in an order in which each prefix has about the same mix of shapes."""
    by_shape: dict[tuple[object, ...], list[Machine]] = {}
    for machine in machines:
        shape = (machine.model, machine.gpus, machine.memory_bytes, machine.cpu_milli)
        by_shape.setdefault(shape, []).append(machine)
    placed = [
        ((rank + 0.5) / len(alike), number, machine)
        for number, alike in enumerate(by_shape.values())
        for rank, machine in enumerate(alike)
    ]
    return [machine for _, _, machine in sorted(placed, key=lambda each: each[:2])]


def model_named(models: Sequence[str], name: str) -> str | None:
    """Return the GPU model with this name, or else the only model that contains the name as a word,
    as ``NVIDIA L40S`` contains ``L40S``. Return None if no model matches, or if several match."""
    if name in models:
        return name
    found = [model for model in models if name.lower() in re.split(r"[\s-]+", model.lower())]
    return found[0] if len(found) == 1 else None


def first_machines(ordered: Sequence[Machine], count: int) -> list[Machine]:
    """Return the first ``count`` machines. If there are fewer, add copies from the start."""
    found = list(ordered[:count])
    for number in range(len(ordered), count):
        like = ordered[number % len(ordered)]
        found.append(replace(like, name=f"{like.name}+{number // len(ordered)}"))
    return found
