"""The overcommitted devices of a pod, who takes the memory, and how its containers ended."""

from headroom.console.responses import stamp
from headroom.console.times import Time
from headroom.console.view import View
from headroom.contract.kube import Pod
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.crowded_pods import crashes_of, crowdings_of
from headroom.core.overuse.victims import failed_ends
from headroom.runtime.server.auth import Sees


class OvercommittedView(View):
    """A device that is or was overcommitted while the pod was on it, or could get it."""

    node: str
    device: str
    gpu: str
    """Name of the device, as in the list of nodes."""
    excess_bytes: int
    """The present excess, or the largest excess if the overcommitment has ended."""
    since: Time
    until: Time | None
    """Null while the device is overcommitted."""
    own: bool
    """Whether the pod itself uses memory of the device that it did not reserve."""
    message: str
    """By how much, since when, and which pods use memory that they did not reserve."""


class FailedContainerView(View):
    """The last end of a container, with an exit code other than 0."""

    container: str
    exit_code: int
    reason: str
    """The reason of Kubernetes, such as Error or OOMKilled."""
    at: Time | None
    restarts: int
    out_of_memory: bool
    """Whether its device was overcommitted when the container ended, so that CUDA probably
    reported "out of memory"."""
    message: str


def overcommitted_views(cluster: Cluster, pod: Pod, sees: Sees) -> list[OvercommittedView]:
    return [
        OvercommittedView(
            node=each.over.node,
            device=each.over.device,
            gpu=each.gpu,
            excess_bytes=each.over.excess_bytes,
            since=stamp(each.began_s),
            until=None if each.ended_s is None else stamp(each.ended_s),
            own=each.is_own,
            message=each.sentence(sees),
        )
        for each in crowdings_of(cluster, pod.metadata.uid)
    ]


def failed_container_views(cluster: Cluster, pod: Pod) -> list[FailedContainerView]:
    crowded = {each.end.container: each.crowding for each in crashes_of(cluster, pod)}
    views = []
    for end in failed_ends(pod):
        message = end.sentence
        if crowding := crowded.get(end.container):
            message += (
                f", while {crowding.gpu} of node {crowding.over.node} was overcommitted: CUDA "
                "probably reported out of memory, see the log of the container"
            )
        views.append(
            FailedContainerView(
                container=end.container,
                exit_code=end.exit_code,
                reason=end.reason,
                at=None if end.at_s is None else stamp(end.at_s),
                restarts=end.restarts,
                out_of_memory=crowding is not None,
                message=message,
            )
        )
    return views


def trouble_of(cluster: Cluster, pod: Pod, sees: Sees) -> str:
    """Return the crash of the pod on an overcommitted device, otherwise its overcommitted device,
    as the end of a sentence; "" if there is neither."""
    if found := crashes_of(cluster, pod):
        crash = found[0]
        gpu, over = crash.crowding.gpu, crash.crowding.over
        end = crash.end.sentence
        return f"{end}, while {gpu} of node {over.node} was overcommitted: " + (
            crash.crowding.causes(sees)
        )
    now = next(
        (each for each in crowdings_of(cluster, pod.metadata.uid) if each.ended_s is None), None
    )
    return now.sentence(sees) if now else ""
