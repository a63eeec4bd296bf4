"""Computes the requests of pods that are bound to a node, and whether another pod fits beside them.

Requests are computed as in kube-scheduler (``PodRequests`` in k8s.io/component-helpers), except
that resources which DRA drivers take from the node itself do not count (feature gate
DRANodeAllocatableResources, alpha).
"""

from collections.abc import Iterable, Mapping
from decimal import Decimal
from functools import partial, reduce

from headroom.contract.kube import (
    Container,
    KubeStruct,
    ObjectMeta,
    PodCondition,
    PodSpec,
    Quantity,
)
from headroom.contract.kube import ResourceRequirements as Resources
from headroom.core.rules.pod_requests import (
    NOTHING,
    Demands,
    amount,
    amounts,
    larger,
    of_containers,
    of_whole_pod,
    spec_requests,
    total,
    with_overhead,
)

#: The resource in a node's allocatable that limits the number of its pods.
PODS = "pods"


class BoundContainer(KubeStruct, frozen=True):
    """The status of a container, with its resources while it is resized in place."""

    name: str = ""
    #: Resources that the kubelet has reserved.
    allocated_resources: Mapping[str, Quantity] | None = None
    #: Resources that the container runtime has applied.
    resources: Resources | None = None


class BoundStatus(KubeStruct, frozen=True):
    conditions: list[PodCondition] | None = None
    #: When the kubelet accepted the pod (RFC 3339).
    start_time: str | None = None
    container_statuses: list[BoundContainer] | None = None
    init_container_statuses: list[BoundContainer] | None = None
    #: The same values for the whole pod.
    allocated_resources: Mapping[str, Quantity] | None = None
    resources: Resources | None = None


class BoundPod(KubeStruct, frozen=True):
    """A bound pod that has not ended, with the fields that determine its requests."""

    metadata: ObjectMeta
    spec: PodSpec = PodSpec()
    status: BoundStatus = BoundStatus()


def bound_demands(pod: BoundPod) -> dict[str, Decimal]:
    """Return the amount of each resource that kube-scheduler counts for the bound pod.

    While the pod is resized in place, this is the largest of three amounts: the request in the
    spec, the amount reserved by the kubelet, and the amount applied by the runtime. A request that
    the node can never satisfy (Infeasible) does not count.
    """
    spec, status = pod.spec, pod.status
    infeasible = _infeasible(status)
    applied = status.resources.requests if status.resources else None
    if status.allocated_resources is not None and applied is not None:
        stages = [amounts(status.allocated_resources), amounts(applied)]
    else:
        reports = {
            each.name: each
            for each in (
                *(status.container_statuses or ()),
                *(status.init_container_statuses or ()),
            )
        }
        read = _reserved, _applied
        stages = [
            of_containers(spec, partial(each, reports=reports, infeasible=infeasible))
            for each in read
        ]
    if not infeasible:
        stages.append(of_containers(spec))
    needs = reduce(larger, stages)
    if whole := of_whole_pod(spec.resources):
        if status.resources is not None:
            reported = Resources(requests=status.allocated_resources)
            whole = larger(of_whole_pod(status.resources), of_whole_pod(reported))
            whole = whole if infeasible else larger(whole, of_whole_pod(spec.resources))
        needs = {**needs, **whole}
    return with_overhead(spec, needs)


def exceeded_by(
    needs: Demands, others: Iterable[Demands], allocatable: Mapping[str, Quantity]
) -> bool:
    """Return whether a pod with these needs does not fit on a node beside these other pods.

    As in kube-scheduler, only the resources that the pod itself requests and the number of pods on
    the node count. Resources that ``allocatable`` does not name are ignored.
    """
    others = list(others)
    taken = total(others)
    taken[PODS] = Decimal(len(others))
    return any(
        needed > NOTHING
        and name in allocatable
        and taken.get(name, NOTHING) + needed > amount(allocatable[name])
        for name, needed in {**needs, PODS: Decimal(1)}.items()
    )


def _reserved(
    container: Container, *, reports: Mapping[str, BoundContainer], infeasible: bool
) -> Demands:
    report = reports.get(container.name)
    if report is not None and report.allocated_resources is not None:
        return amounts(report.allocated_resources)
    return {} if infeasible else spec_requests(container)


def _applied(
    container: Container, *, reports: Mapping[str, BoundContainer], infeasible: bool
) -> Demands:
    report = reports.get(container.name)
    if report is not None and report.resources and report.resources.requests is not None:
        return amounts(report.resources.requests)
    return _reserved(container, reports=reports, infeasible=infeasible)


def _infeasible(status: BoundStatus) -> bool:
    pending = [each for each in status.conditions or () if each.type == "PodResizePending"]
    return bool(pending) and pending[0].reason == "Infeasible"
