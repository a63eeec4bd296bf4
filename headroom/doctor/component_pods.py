"""Pods of other components, reduced to the few fields that the doctor's rules read."""

import re
from collections.abc import Mapping

from headroom.contract.kube import KubeStruct, ObjectMeta, PodCondition

_VERSION = re.compile(r"v?(\d+)\.(\d+)(\.|$)")


class Container(KubeStruct, frozen=True):
    name: str = ""
    image: str = ""
    command: list[str] | None = None
    args: list[str] | None = None

    @property
    def tag(self) -> str:
        """The tag of the image, or "" if it has none."""
        name = self.image.partition("@")[0].rpartition("/")[2]
        return name.partition(":")[2]

    @property
    def minor(self) -> tuple[int, int] | None:
        """The minor version in the tag, such as (1, 37), or None if the tag is not a version."""
        version = _VERSION.match(self.tag)
        return (int(version[1]), int(version[2])) if version else None


class _Spec(KubeStruct, frozen=True):
    node_name: str | None = None
    containers: list[Container] | None = None


class _Waiting(KubeStruct, frozen=True):
    reason: str = ""


class _State(KubeStruct, frozen=True):
    waiting: _Waiting | None = None


class _ContainerStatus(KubeStruct, frozen=True):
    state: _State | None = None


class _Status(KubeStruct, frozen=True):
    phase: str | None = None
    conditions: list[PodCondition] | None = None
    container_statuses: list[_ContainerStatus] | None = None
    init_container_statuses: list[_ContainerStatus] | None = None


class ComponentPod(KubeStruct, frozen=True):
    """A pod of another component, reduced to the few fields that the rules read."""

    metadata: ObjectMeta
    spec: _Spec = _Spec()
    status: _Status | None = None

    @property
    def labels(self) -> Mapping[str, str]:
        return self.metadata.labels or {}

    @property
    def ready(self) -> bool:
        conditions = (self.status.conditions if self.status else None) or ()
        return any(each.type == "Ready" and each.status == "True" for each in conditions)

    @property
    def waits_for(self) -> str:
        """The reason why a container waits, such as CrashLoopBackOff, or else the pod's phase."""
        status = self.status or _Status()
        containers = [*(status.init_container_statuses or ()), *(status.container_statuses or ())]
        for each in containers:
            if each.state and each.state.waiting and each.state.waiting.reason:
                return str(each.state.waiting.reason)
        return status.phase or "unknown"

    @property
    def tag(self) -> str:
        """The tag of the first container's image, or "" if it has none."""
        return self.spec.containers[0].tag if self.spec.containers else ""
