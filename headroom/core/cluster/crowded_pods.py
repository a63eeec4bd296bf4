"""Finds the overcommitted devices of a pod in the state of the cluster."""

from collections.abc import Iterator

from headroom.contract.device_names import noun
from headroom.contract.kube import Pod
from headroom.core.cluster.cluster import Cluster
from headroom.core.overuse.tracker import OvercommittedSpan
from headroom.core.overuse.victims import Crash, Crowding, crashes


def crowdings_of(state: Cluster, uid: str) -> list[Crowding]:
    """Return the devices that are overcommitted, or were in the last hour, while the pod was on
    them or could get them; the current ones first."""
    found = [crowding_of_device(state, span, uid) for span in _spans(state) if uid in span.uids]
    return sorted(found, key=lambda each: (each.ended_s is not None, -(each.ended_s or 0.0)))


def crowding_of_device(state: Cluster, span: OvercommittedSpan, uid: str = "") -> Crowding:
    """Return the span with the name of the device and Unix times, as the pod ``uid`` sees it."""
    over = span.worst if span.ended_s is not None else span.latest
    gpunode = state.gpunode(over.node)
    devices = gpunode.status.devices if gpunode and gpunode.status else ()
    gpu = next((noun(each.name) for each in devices if each.uuid == over.device), over.device)
    ended_s = None if span.ended_s is None else state.epoch_s + span.ended_s
    return Crowding(
        uid,
        over,
        span.worst,
        gpu,
        began_s=state.epoch_s + span.began_s,
        ended_s=ended_s,
        at_start=span.at_start,
        is_present=span.ended_s is None,
    )


def crashes_of(state: Cluster, pod: Pod) -> list[Crash]:
    """Return the containers of the pod that failed on a device while it was overcommitted."""
    return list(crashes(pod, crowdings_of(state, pod.metadata.uid)))


def crashed_pods(state: Cluster) -> list[tuple[Pod, Crash]]:
    """Return all pods with such a container, with the latest crash of each."""
    uids = {uid for span in _spans(state) for uid in span.uids}
    found = []
    for uid in sorted(uids):
        pod = state.pod(uid)
        if pod is not None and (crash := next(iter(crashes_of(state, pod)), None)):
            found.append((pod, crash))
    return found


def _spans(state: Cluster) -> Iterator[OvercommittedSpan]:
    """Yield the last span of each device, and its earlier spans."""
    for span in state.overcommits.spans.values():
        yield span
        yield from span.earlier
