"""The fields of a pod that the recorder reads, such as its controller, its programs and the ends of
its containers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headroom.contract.annotations import Amount
from headroom.contract.kube import KubeStruct, ObjectMeta, OwnerReference, Pod, PodStatus
from headroom.contract.vramprofile import ProfileController, seconds
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import VramRequest, asks_for_gpu, understand
from headroom.core.recommend.families import profile_controller
from headroom.core.recommend.pod_programs import programs_of
from headroom.core.recommend.programs import Program

#: Condition of a pod that is ended by an eviction, a preemption or the loss of its node.
DISRUPTED = "DisruptionTarget"
OOM_KILLED = "OOMKilled"


class _Terminated(KubeStruct, frozen=True):
    exit_code: int = 0
    reason: str = ""
    finished_at: str = ""


class _State(KubeStruct, frozen=True):
    terminated: _Terminated | None = None


class _Status(KubeStruct, frozen=True):
    name: str = ""
    state: _State | None = None
    last_state: _State | None = None


class _PodStatus(KubeStruct, frozen=True):
    container_statuses: list[_Status] | None = None
    init_container_statuses: list[_Status] | None = None


class _Ends(KubeStruct, frozen=True):
    """The fields of a pod that ``contract.kube.Pod`` does not have."""

    status: _PodStatus | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The last end of a container."""

    exit_code: int
    reason: str
    #: Unix time in seconds, or 0 if it is unknown.
    finished_s: float


@dataclass(frozen=True, slots=True)
class PodFacts:
    namespace: str
    name: str
    generate_name: str
    controller: OwnerReference | None
    #: The program of each container, by the container's name.
    programs: Mapping[str, Program] = field(default_factory=dict)
    #: The last end of each container that has ended, by the container's name.
    ends: Mapping[str, End] = field(default_factory=dict)
    #: Whether the pod is or was ended by an eviction, a preemption or the loss of its node.
    disrupted: bool = False
    #: Whether the pod is being deleted.
    deleting: bool = False
    #: The node that the pod is bound to. Empty for a pending pod. Only reports of this node count
    #: for the pod.
    node: str = ""
    #: The amount on each device that the pod's author requests, by container.
    requests: Mapping[str, Amount] = field(default_factory=dict)
    #: The controller by which a new pod of the same owner finds the profile.
    found_by: ProfileController = field(default_factory=ProfileController)


class ObservedPod(Pod, frozen=True):
    """A pod that is watched, reduced to its identity and its facts. ``facts`` is None for pods
    without a GPU."""

    facts: Any = None


_pod_decoder = msgspec.json.Decoder(Pod)
_ends_decoder = msgspec.json.Decoder(_Ends)


def read_pod(raw: bytes | msgspec.Raw, rules: Rules) -> ObservedPod:
    """Decode a pod. Raise ``ValueError`` if it cannot be decoded."""
    pod = _pod_decoder.decode(raw)
    identity = ObjectMeta(
        name=pod.metadata.name,
        namespace=pod.metadata.namespace,
        uid=pod.metadata.uid,
        resource_version=pod.metadata.resource_version,
    )
    if not asks_for_gpu(pod, rules):
        return ObservedPod(metadata=identity)
    status = _ends_decoder.decode(raw).status or _PodStatus()
    found = understand(pod, None, rules)
    requests = {
        each.name: each.amount
        for each in (found.containers if isinstance(found, VramRequest) else ())
        if each.source == "annotation"
    }
    return ObservedPod(metadata=identity, facts=_facts(pod, status, requests, *programs_of(raw)))


def _facts(
    pod: Pod,
    status: _PodStatus,
    requests: Mapping[str, Amount],
    programs: Mapping[str, Program],
    generate_name: str,
) -> PodFacts:
    statuses = [*(status.init_container_statuses or ()), *(status.container_statuses or ())]
    return PodFacts(
        pod.metadata.namespace,
        pod.metadata.name,
        generate_name,
        pod.metadata.controller,
        programs,
        {each.name: end for each in statuses if (end := _end(each)) is not None},
        _is_disrupted(pod.status),
        pod.metadata.deletion_timestamp is not None,
        pod.node,
        requests,
        profile_controller(pod, generate_name),
    )


def _end(status: _Status) -> End | None:
    for state in (status.state, status.last_state):
        if state is not None and (ended := state.terminated) is not None:
            return End(ended.exit_code, ended.reason, seconds(ended.finished_at))
    return None


def _is_disrupted(status: PodStatus | None) -> bool:
    conditions = (status.conditions if status else None) or ()
    return any(each.type == DISRUPTED and each.status == "True" for each in conditions)
