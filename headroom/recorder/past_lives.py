"""Finds out from metrics in Prometheus which lives there were before the recorder ran.

The peaks come from the metrics of Headroom's agent. If the agent did not run, they come from the
memory that dcgm-exporter shows for the pod on a GPU, provided that no other pod used this GPU at
the time. Owners, images and ends come from kube-state-metrics.

Prometheus does not have the arguments and the environment of a container, so it does not show which
program a past life ran.
When a pod of the same owner runs, past lives count for the pod's program. All lives of a ReplicaSet
count. The lives of other owners count if their image and tag are the same, and are dropped
otherwise.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from headroom.bounded_dict import Bounded
from headroom.contract.dcgm import Key, key_of_series
from headroom.core.recommend.families import family
from headroom.core.recommend.lives import DAY_S, Ending, Life
from headroom.recorder.pod_facts import PodFacts
from headroom.recorder.profile_book import Owned
from headroom.runtime.metric_history import Reading, Sample, read_days
from headroom.runtime.promql import MIB, MODELS, Queries, own_label

#: Number of days to read. Older peaks would have less than half of their weight.
DAYS = 14
#: Maximum number of containers whose past lives wait for a pod of their owner, and maximum number
#: of lives of each container.
MAX_CONTAINERS, MAX_LIVES = 20_000, 200
#: A life has ended if its last sample is older than this number of seconds.
_GONE_AFTER_S = 15 * 60.0
#: Maximum error of the times of the first and last samples.
_STEP_S = 300.0
#: Maximum value of a measurement. Larger values, infinities and NaN are ignored.
_MOST_VALUE = float(1 << 60)


@dataclass(frozen=True, slots=True)
class Owner:
    """The properties of a pod's controller that all pods of the same owner share."""

    namespace: str
    kind: str
    #: The full name of a ReplicaSet. For other kinds, the family of the name.
    name: str


@dataclass(frozen=True, slots=True)
class PastLife:
    owner: Owner
    container: str
    #: The image of the container. Empty if kube-state-metrics does not show it.
    image: str
    model: str
    life: Life


@dataclass(slots=True)
class _Series:
    """The measurements of a pod's container on a device over all days."""

    model: str
    peak_bytes: float = 0.0
    first_s: float = math.inf
    last_s: float = 0.0


#: The samples of all days, by the name of their query.
Answers = Mapping[str, Sequence[Sample]]
#: The namespace and the name of a pod, its container, and its uid if the metric contains it.
_Container = tuple[str, str, str, str]
#: A container and its device. The device is None if the metric does not identify it.
_Use = tuple[_Container, Key | None]


def reading(queries: Queries, now_s: float) -> Reading[list[PastLife]]:
    """Return the lives that have ended. ``now_s`` is the end of the last day."""
    totals, daily = queries.totals(DAYS), queries.ended_lives
    return past_lives((yield from read_days(totals, daily, queries.peaks, DAYS, now_s)), now_s)


def past_lives(answers: Answers, now_s: float) -> list[PastLife]:
    """Return the lives that have ended, the oldest first. ``now_s`` is the end of the last day."""
    pods = _Pods(answers)
    own = _by_device(answers, {"peak": 1}, pods)
    found = dict(own)
    known = {container[:2] for container, _ in own}
    used = _by_device(answers, {"used": MIB, "used-bytes": 1}, pods)
    dcgm = _alone({key: each for key, each in used.items() if key[1] is not None})
    found |= {key: each for key, each in dcgm.items() if key[0][:2] not in known}
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
        # The agent's metric contains the peak since the start of the container, even if the samples
        # begin later.
        partial = (container, device) not in own and each.first_s < begin_s + 2 * _STEP_S
        ending = pods.ending(namespace, pod, name)
        life = Life(peak_bytes, each.first_s, each.last_s, ending, None, partial)
        image = pods.images.get((namespace, pod, name), "")
        lives[container] = PastLife(owner, name, image, each.model, life)
    return sorted(lives.values(), key=lambda each: each.life.until_s)


class _Pods:
    """The owners, images and ends of pods that request a GPU, from kube-state-metrics."""

    def __init__(self, answers: Answers) -> None:
        self._nodes: dict[tuple[str, str], set[str]] = defaultdict(set)
        for sample in answers["node"]:
            if node := own_label(sample.labels, "node"):
                self._nodes[_pod(sample)].add(node)
        self._owners = {_pod(sample): sample.labels for sample in answers["owner"]}
        self.images = {
            (*_pod(sample), own_label(sample.labels, "container")): sample.labels.get("image_spec")
            or sample.labels.get("image", "")
            for sample in answers["image"]
        }
        self._ended = {
            ending: {_pod(sample) for sample in answers[ending.value] if sample.value > 0}
            for ending in (Ending.FAILED, Ending.EVICTED)
        }
        self._killed = {
            (*_pod(sample), own_label(sample.labels, "container"))
            for sample in (*answers["oom-killed 0"], *answers["oom-killed 1"])
            if sample.value > 0
        }

    def may_be_on(self, namespace: str, pod: str, use: Sample) -> bool:
        """Return whether the pod can have run on the node that the scrape target reports in label
        ``node``.

        Without this check, a node could report peaks of pods on other nodes.
        """
        nodes, node = self._nodes[namespace, pod], use.labels.get("node")
        return not nodes or not node or node in nodes

    def owner(self, namespace: str, pod: str) -> Owner | None:
        """Return the owner of a pod, or None if it is unknown."""
        labels = self._owners.get((namespace, pod))
        if labels is None:
            return None
        kind, name = labels.get("owner_kind", ""), labels.get("owner_name", "")
        return _owner(namespace, pod, kind if kind != "<none>" else "", name, "")

    def ending(self, namespace: str, pod: str, container: str) -> Ending:
        """Return how a container ended. If no metric shows the reason, its pod was deleted and the
        life counts as completed."""
        if (namespace, pod, container) in self._killed:
            return Ending.OOM_KILLED
        for ending in (Ending.EVICTED, Ending.FAILED):
            if (namespace, pod) in self._ended[ending]:
                return ending
        return Ending.COMPLETED


def _by_device(answers: Answers, units: Mapping[str, int], pods: _Pods) -> dict[_Use, _Series]:
    """Return the series of all containers. ``units`` maps the first word of a query's name to the
    number of bytes in the unit of its samples."""
    found: dict[_Use, _Series] = {}
    for (name, unit_bytes), figure in product(units.items(), ("most", "first", "last")):
        for sample in answers[f"{name} {figure}"]:
            namespace, pod = _pod(sample)
            if not namespace or not pod or not 0 <= sample.value <= _MOST_VALUE:
                continue
            if not pods.may_be_on(namespace, pod, sample):
                continue
            container = namespace, pod, *_labels(sample, "container", "pod_uid")
            device = key_of_series(sample.labels)
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
    found: Mapping[_Use, _Series],
) -> dict[_Use, _Series]:
    """Return the series of pods that were alone on their device the whole time."""
    by_device: dict[Key | None, list[tuple[_Container, _Series]]] = defaultdict(list)
    for (container, device), each in found.items():
        by_device[device].append((container, each))
    kept: dict[_Use, _Series] = {}
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
    return _labels(sample, "namespace", "pod")


def _labels(sample: Sample, first: str, second: str) -> tuple[str, str]:
    return own_label(sample.labels, first), own_label(sample.labels, second)


def _model(sample: Sample) -> str:
    return next(filter(None, (own_label(sample.labels, name) for name in MODELS)), "")


def _owner(namespace: str, pod: str, kind: str, name: str, generate_name: str) -> Owner:
    if not kind:
        return Owner(namespace, "Pod", family(pod, generate_name))
    return Owner(namespace, kind, name if kind == "ReplicaSet" else family(name))


def owner_of_pod(pod: PodFacts) -> Owner:
    """Return the owner of an existing pod, which equals the owner of its past pods."""
    kind = pod.controller.kind if pod.controller else ""
    name = pod.controller.name if pod.controller else ""
    return _owner(pod.namespace, pod.name, kind, name, pod.generate_name)


class PastLives:
    """Past lives that wait for a running pod of their owner."""

    def __init__(self) -> None:
        self._lives: Bounded[tuple[Owner, str], list[PastLife]] = Bounded(MAX_CONTAINERS)

    def load(self, lives: Iterable[PastLife]) -> None:
        """Replace all lives. The given lives are sorted, the oldest first."""
        self._lives.clear()
        for each in lives:
            older = self._lives.get((each.owner, each.container)) or []
            self._lives[each.owner, each.container] = [*older, each][-MAX_LIVES:]

    def claim(self, running: Iterable[Owned], is_new: Callable[[Owned], bool]) -> list[Owned]:
        """Return the past lives of the owners of these running lives, and forget them.

        ``is_new`` returns whether no complete life of the container is recorded. If it returns
        False, the container's past lives are dropped, because some of them may already be recorded.
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
