"""Evicts the pods on GPUs, and waits until their memory is free. Respects disruption budgets."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from headroom.kubectl.cluster_changes import Outcome, PodRead

#: Time between two attempts, as in kubectl drain.
EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Held:
    """A pod that is on a GPU, or may be on it."""

    namespace: str
    name: str
    uid: str
    observed: bool

    def __str__(self) -> str:
        return f"pod {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Fate:
    """The result for one pod as a line, and whether the pod stayed."""

    line: str
    stayed: bool


class Pods(Protocol):
    """The calls of the API server that evictions need."""

    def pod(self, namespace: str, name: str) -> PodRead | None: ...

    def evict(self, namespace: str, name: str, uid: str) -> tuple[Outcome, str]: ...


@dataclass(frozen=True, slots=True)
class Clock:
    monotonic_s: Callable[[], float]
    sleep: Callable[[float], object]


def held(devices: Iterable[Mapping[str, Any]]) -> dict[str, Held]:
    """Return the pods on these devices by uid. ``devices`` are from the debug API."""
    found: dict[str, Held] = {}
    for device in devices:
        for pod in device["holders"]:
            observed = pod["observed"] or (pod["uid"] in found and found[pod["uid"]].observed)
            found[pod["uid"]] = Held(pod["namespace"], pod["name"], pod["uid"], observed)
    return found


def why_kept(pod: PodRead, force: bool) -> str:
    """Return why a pod is not evicted, or "" if it may be.

    ``force`` allows evicting pods without a controller.
    """
    if pod.mirror:
        return "it is a mirror pod: remove its manifest from the node's kubelet"
    if pod.controller.startswith("DaemonSet "):
        return f"it belongs to {pod.controller}, which would create it again on this node"
    if not pod.controller and not force:
        return "it has no controller that would create it again; --force evicts it"
    return ""


def evicted(
    on_gpus: Callable[[], Mapping[str, Held]],
    pods: Pods,
    force: bool,
    timeout_s: float,
    clock: Clock,
) -> Iterator[Fate]:
    """Evict all pods that ``on_gpus`` returns, and yield the result for each pod once.

    A pod counts as evicted when ``on_gpus`` no longer returns it, because then its memory is free.
    A pod that no report shows on a GPU yet is evicted only after a report shows it there. Raises
    ``CommandError``."""
    deadline_s = clock.monotonic_s() + timeout_s
    kept: set[str] = set()
    ending: dict[str, Held] = {}
    while True:
        found = {uid: pod for uid, pod in on_gpus().items() if uid not in kept}
        for uid in [*ending]:
            if uid not in found:
                yield Fate(f"{ending.pop(uid)}: evicted", False)
        waiting: dict[str, str] = {}
        for uid, pod in found.items():
            if uid in ending:
                continue
            if not pod.observed:
                waiting[uid] = "no report shows yet whether it is on this GPU"
                continue
            read = pods.pod(pod.namespace, pod.name)
            if read is None or read.uid != uid or read.ends:
                ending[uid] = pod
                continue
            if why := why_kept(read, force):
                kept.add(uid)
                yield Fate(f"{pod}: stays: {why}", True)
                continue
            outcome, reason = pods.evict(pod.namespace, pod.name, uid)
            match outcome:
                case Outcome.LATER:
                    waiting[uid] = reason
                case Outcome.FAILED:
                    kept.add(uid)
                    yield Fate(f"{pod}: stays: {reason}", True)
                case _:
                    ending[uid] = pod
        if not ending and not waiting:
            return
        left_s = deadline_s - clock.monotonic_s()
        if left_s <= 0:
            yield from (
                Fate(f"{pod}: evicted, but has not ended yet", True) for pod in ending.values()
            )
            yield from (Fate(f"{found[uid]}: stays: {why}", True) for uid, why in waiting.items())
            return
        clock.sleep(min(EVERY_S, left_s))
