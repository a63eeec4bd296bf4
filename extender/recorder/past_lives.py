"""Lives from before the recorder ran, read from metrics in Prometheus.

Peaks are those of Headroom's agent if it has them, else the memory that dcgm-exporter shows for the
pod of a GPU, as long as no other pod used this GPU at the time. Owners, images and ends are from
kube-state-metrics.

Prometheus has no arguments and no environment, so it does not show which program a past life ran.
When a pod of the same owner runs, past lives count for the pod's program: all lives of a
ReplicaSet, and lives of other owners if their image and tag are the same. All others are dropped.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from contract.dcgm import USED_BYTES, USED_MIB
from extender.bounded import Bounded
from extender.recommend.families import family
from extender.recommend.lives import DAY_S, Ending, Life
from extender.recorder.book import Owned
from extender.recorder.pod_facts import PodFacts

#: Days that are read. After this time, a peak has less than half of its weight.
DAYS = 14
#: Containers whose past lives wait for a pod of their owner, and lives of each.
MAX_CONTAINERS, MAX_LIVES = 20_000, 200
#: A life whose last sample is older has ended.
_GONE_AFTER_S = 15 * 60.0
#: Step of the queries for first and last samples, and so the error of these times.
STEP = "5m"
_STEP_S = 300.0
_MIB = 1 << 20
#: Limit of a value; NaN, infinities and larger values are no measurements.
_MOST_VALUE = float(1 << 60)

_REQUESTS = 'kube_pod_container_resource_requests{resource=~"nvidia_com_.*"}'
#: The pods whose other metrics matter: those that requested a GPU on that day.
_OF_GPU_PODS = f" and on (namespace, pod) max_over_time({_REQUESTS}[1d])"
PEAK = "headroom_pod_peak_bytes"
#: The model's label of the agent and of dcgm-exporter.
_MODELS = ("model_name", "modelName")
#: Beginning of the names of queries -> metric.
_MEMORY = {"peak": PEAK, "used": USED_MIB, "used-bytes": USED_BYTES}


def _daily(metric: str) -> str:
    return f"max_over_time({metric}[1d]){_OF_GPU_PODS}"


#: Queries over one day before the time at which they are evaluated.
QUERIES: Mapping[str, str] = {
    **{
        f"{name} {figure}": promql.format(metric)
        for name, metric in _MEMORY.items()
        for figure, promql in (
            ("most", "max_over_time({0}[1d])"),
            ("first", f"min_over_time(timestamp({{0}})[1d:{STEP}])"),
            ("last", f"max_over_time(timestamp({{0}})[1d:{STEP}])"),
        )
    },
    "owner": _daily("kube_pod_owner"),
    "image": _daily("kube_pod_container_info"),
    "failed": _daily('kube_pod_status_phase{phase="Failed"}'),
    "evicted": _daily('kube_pod_status_reason{reason=~"Evicted|NodeLost|NodeAffinity|Shutdown"}'),
    **{
        f"oom-killed {number}": _daily(f'{metric}{{reason="OOMKilled"}}')
        for number, metric in enumerate(
            (
                "kube_pod_container_status_last_terminated_reason",
                "kube_pod_container_status_terminated_reason",
            )
        )
    },
}


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Mapping[str, str]
    value: float


#: Name of a query -> its samples, of all days.
Answers = Mapping[str, Sequence[Sample]]


@dataclass(frozen=True, slots=True)
class Owner:
    """The part of a pod's controller that later pods of the same owner have in common with it."""

    namespace: str
    kind: str
    #: A ReplicaSet's whole name, else the family of its name.
    name: str


@dataclass(frozen=True, slots=True)
class PastLife:
    owner: Owner
    container: str
    #: Empty if kube-state-metrics does not show it.
    image: str
    model: str
    life: Life


@dataclass(slots=True)
class _Series:
    """A container of a pod on a device, over all days."""

    model: str
    peak_bytes: float = 0.0
    first_s: float = math.inf
    last_s: float = 0.0


#: Namespace and name of a pod, its container, and its uid if the metric has it.
_Container = tuple[str, str, str, str]


def past_lives(answers: Answers, now_s: float) -> list[PastLife]:
    """Return the lives that have ended, the oldest first. ``now_s``: the end of the last day."""
    own = _by_device(answers, {"peak": 1})
    found = dict(own)
    known = {container[:2] for container, _ in own}
    used = _by_device(answers, {"used": _MIB, "used-bytes": 1})
    dcgm = _alone({key: each for key, each in used.items() if key[1]})
    found |= {key: each for key, each in dcgm.items() if key[0][:2] not in known}
    pods = _Pods(answers)
    begin_s = now_s - DAYS * DAY_S
    lives: dict[_Container, PastLife] = {}
    for (container, device), each in found.items():
        namespace, pod, name, _ = container
        owner = pods.owner(namespace, pod)
        if owner is None or not name or each.last_s > now_s - _GONE_AFTER_S:
            continue
        before = lives.get(container)
        peak_bytes = max(int(each.peak_bytes), before.life.peak_bytes if before else 0)
        if peak_bytes <= 0:
            continue
        # The peak of an agent's metric is that since the start, whenever the samples begin.
        partial = (container, device) not in own and each.first_s < begin_s + 2 * _STEP_S
        ending = pods.ending(namespace, pod, name)
        life = Life(peak_bytes, each.first_s, each.last_s, ending, None, partial)
        image = pods.images.get((namespace, pod, name), "")
        lives[container] = PastLife(owner, name, image, each.model, life)
    return sorted(lives.values(), key=lambda each: each.life.until_s)


class _Pods:
    """The owners, images and ends of pods that request a GPU, from kube-state-metrics."""

    def __init__(self, answers: Answers) -> None:
        self._owners = {_pod(sample): sample.labels for sample in answers["owner"]}
        self.images = {
            (*_pod(sample), _label(sample, "container")): sample.labels.get("image_spec")
            or sample.labels.get("image", "")
            for sample in answers["image"]
        }
        self._ended = {
            ending: {_pod(sample) for sample in answers[ending.value] if sample.value > 0}
            for ending in (Ending.FAILED, Ending.EVICTED)
        }
        self._killed = {
            (*_pod(sample), _label(sample, "container"))
            for sample in (*answers["oom-killed 0"], *answers["oom-killed 1"])
            if sample.value > 0
        }

    def owner(self, namespace: str, pod: str) -> Owner | None:
        """Return the owner of a pod; None if it is not known."""
        labels = self._owners.get((namespace, pod))
        if labels is None:
            return None
        kind, name = labels.get("owner_kind", ""), labels.get("owner_name", "")
        return _owner(namespace, pod, kind if kind != "<none>" else "", name, "")

    def ending(self, namespace: str, pod: str, container: str) -> Ending:
        """Return how a container ended. A pod without another sign of its end was deleted."""
        if (namespace, pod, container) in self._killed:
            return Ending.OOM_KILLED
        for ending in (Ending.EVICTED, Ending.FAILED):
            if (namespace, pod) in self._ended[ending]:
                return ending
        return Ending.COMPLETED


def _by_device(answers: Answers, units: Mapping[str, int]) -> dict[tuple[_Container, str], _Series]:
    """Return the series of all containers. ``units``: beginning of the queries' names -> bytes."""
    found: dict[tuple[_Container, str], _Series] = {}
    for (name, unit_bytes), figure in product(units.items(), ("most", "first", "last")):
        for sample in answers[f"{name} {figure}"]:
            namespace, pod = _pod(sample)
            if not namespace or not pod or not 0 <= sample.value <= _MOST_VALUE:
                continue
            container = namespace, pod, _label(sample, "container"), _label(sample, "pod_uid")
            device = _label(sample, "UUID") + _label(sample, "GPU_I_ID")
            each = found.setdefault((container, device), _Series(_model(sample)))
            match figure:
                case "most":
                    each.peak_bytes = max(each.peak_bytes, sample.value * unit_bytes)
                case "first":
                    each.first_s = min(each.first_s, sample.value)
                case _:
                    each.last_s = max(each.last_s, sample.value)
    # Lives that are shorter than a step may have no times.
    return {key: each for key, each in found.items() if each.first_s <= each.last_s}


def _alone(
    found: Mapping[tuple[_Container, str], _Series],
) -> dict[tuple[_Container, str], _Series]:
    """Return the series of pods that had their device for themselves all the time."""
    by_device: dict[str, list[tuple[_Container, _Series]]] = defaultdict(list)
    for (container, device), each in found.items():
        by_device[device].append((container, each))
    kept: dict[tuple[_Container, str], _Series] = {}
    for device, several in by_device.items():
        several.sort(key=lambda pair: pair[1].first_s)
        shared = [False] * len(several)
        latest = 0
        for i in range(1, len(several)):
            if several[i][1].first_s < several[latest][1].last_s:
                shared[i] = shared[latest] = True
            if several[i][1].last_s > several[latest][1].last_s:
                latest = i
        for (container, each), is_shared in zip(several, shared, strict=True):
            if not is_shared:
                kept[container, device] = each
    return kept


def _pod(sample: Sample) -> tuple[str, str]:
    return _label(sample, "namespace"), _label(sample, "pod")


def _label(sample: Sample, name: str) -> str:
    """Return a label of the exporter, which Prometheus renames if the target has it too."""
    return sample.labels.get(f"exported_{name}") or sample.labels.get(name, "")


def _model(sample: Sample) -> str:
    return next(filter(None, (_label(sample, name) for name in _MODELS)), "")


def _owner(namespace: str, pod: str, kind: str, name: str, generate_name: str) -> Owner:
    if not kind:
        return Owner(namespace, "Pod", family(pod, generate_name))
    return Owner(namespace, kind, name if kind == "ReplicaSet" else family(name))


def owner_of_pod(pod: PodFacts) -> Owner:
    """Return the owner of an existing pod, equal to that of its owner's past pods."""
    kind = pod.controller.kind if pod.controller else ""
    name = pod.controller.name if pod.controller else ""
    return _owner(pod.namespace, pod.name, kind, name, pod.generate_name)


class PastLives:
    """Past lives that wait for a running pod of their owner."""

    def __init__(self) -> None:
        self._lives: Bounded[tuple[Owner, str], list[PastLife]] = Bounded(MAX_CONTAINERS)

    def load(self, lives: Iterable[PastLife]) -> None:
        """Replace all lives; the oldest come first."""
        self._lives.clear()
        for each in lives:
            older = self._lives.get((each.owner, each.container)) or []
            self._lives[each.owner, each.container] = [*older, each][-MAX_LIVES:]

    def claim(self, running: Iterable[Owned], is_new: Callable[[Owned], bool]) -> list[Owned]:
        """Return the past lives of the owners of these running lives, and forget them.

        ``is_new`` returns whether no complete life of the container is recorded; otherwise its
        past lives are dropped, because some of them may be recorded already.
        """
        if not self._lives:
            return []
        claimed: list[Owned] = []
        for each in running:
            tracked = each.tracked
            lives = self._lives.pop((owner_of_pod(tracked.pod), tracked.container), None)
            if lives and is_new(each):
                claimed += [
                    replace(each, tracked=replace(tracked, model=past.model, life=past.life))
                    for past in lives
                    if past.owner.kind == "ReplicaSet"
                    or (past.image and past.image == tracked.program.image)
                ]
        return claimed

    def __len__(self) -> int:
        return sum(len(lives) for lives in self._lives.values())
