"""Decides when the start of a pod that starts alone has ended.

Such a pod is *starting* from its bind until one of these conditions holds. Until then, other pods
that start alone are not placed on its devices.

* It is ready, and each of its GPU containers has a readiness or startup probe. Without a probe, a
  container is ready as soon as it runs.
* According to the agent, the use of each of its GPU containers has settled on every device that the
  container uses. Init containers that end do not count, because the engine starts after them.
* The kubelet cannot start its containers, for example because an image cannot be pulled, and
  ``STUCK_AFTER_S`` seconds have passed since the bind.
* Its start has timed out.

A pod that restarts later does not start alone again.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from headroom.contract.gpunode import PodUse
from headroom.contract.kube import Container, ContainerStatus, Pod

#: During this number of seconds after the bind, a failed image pull does not end the start, because
#: the kubelet retries the pull.
STUCK_AFTER_S = 60.0
#: Reasons of waiting containers that cannot run until their user or a registry fixes the problem.
_STUCK = frozenset(
    {
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImageInspectError",
        "ImagePullBackOff",
        "InvalidImageName",
    }
)


class StartEnd(Enum):
    """Why a start has ended."""

    READY = "ready"
    SETTLED = "settled"
    STUCK = "stuck"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a pod."""

    #: Seconds since the pod's bind. None if the time of the bind is unknown, which counts as timed
    #: out.
    age_s: float | None
    timeout_s: int
    #: The pod, or None if it is deleted. The containers of a deleted pod may still run.
    pod: Pod | None
    #: Names of the pod's containers that request a GPU.
    gpu_containers: Collection[str]
    #: The rows of the pod in the node's report.
    rows: Sequence[PodUse]

    @property
    def _engines(self) -> list[str]:
        """Names of the GPU containers that keep running after the start. Empty if there are none,
        or if they are unknown."""
        of_app = () if self.pod is None else _app_containers(self.pod)
        return [each.name for each in of_app if each.name in self.gpu_containers]

    @property
    def end(self) -> StartEnd | None:
        """Why the start has ended, or None if the pod is starting."""
        if self.pod is not None and _is_ready(self.pod, self.gpu_containers):
            return StartEnd.READY
        if _has_settled(self._engines, self.rows):
            return StartEnd.SETTLED
        # A bind time in the far future comes from a wrong clock, and must not block the device for
        # long.
        age_s = self.timeout_s if self.age_s is None else abs(self.age_s)
        if age_s >= self.timeout_s:
            return StartEnd.TIMED_OUT
        if self.pod is not None and age_s >= STUCK_AFTER_S and stuck_reason(self.pod):
            return StartEnd.STUCK
        return None


def _is_ready(pod: Pod, gpu_containers: Collection[str]) -> bool:
    status = pod.status
    if status is None or not any(
        each.type == "Ready" and each.status == "True" for each in status.conditions or ()
    ):
        return False
    return not lacks_probe(pod, gpu_containers)


def lacks_probe(pod: Pod, gpu_containers: Collection[str]) -> bool:
    """Return whether one of these containers is ready as soon as it runs, because it has neither a
    readiness nor a startup probe."""
    return any(
        not (container.readiness_probe or container.startup_probe)
        for container in _app_containers(pod)
        if container.name in gpu_containers
    )


def _app_containers(pod: Pod) -> list[Container]:
    """Return the containers that count for the pod's readiness, including native sidecars."""
    init_containers = pod.spec.init_containers or ()
    sidecars = [each for each in init_containers if each.restart_policy == "Always"]
    return [*sidecars, *(pod.spec.containers or ())]


def _has_settled(engines: Sequence[str], rows: Iterable[PodUse]) -> bool:
    """Return whether the use of each of these containers has settled in all its rows that show a
    start.

    If there are no ``engines``, all such rows of the pod must have settled. A row without a
    container name can belong to any container, because the pod chose the device itself.
    """
    started = [row for row in rows if row.started_at]
    if not engines:
        return _all_settled(started)
    return all(_all_settled([r for r in started if r.container in (name, "")]) for name in engines)


def _all_settled(rows: Sequence[PodUse]) -> bool:
    return bool(rows) and all(row.settled_at for row in rows)


def stuck_reason(pod: Pod) -> str:
    """Return why the kubelet cannot start the pod's containers, or an empty string if it can or if
    one runs."""
    status = pod.status
    if status is None:
        return ""
    of_app = status.container_statuses or ()
    if any(each.state and each.state.running for each in of_app):
        return ""
    statuses: list[ContainerStatus] = [*(status.init_container_statuses or ()), *of_app]
    reasons = (each.state.waiting.reason for each in statuses if each.state and each.state.waiting)
    return next((reason for reason in reasons if reason in _STUCK), "")
