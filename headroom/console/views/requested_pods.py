"""Pods that callers ask about: existing pods, hypothetical pods, and pods from a manifest."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
from fastapi import HTTPException
from pydantic import ConfigDict, Field

from headroom.console.view import View
from headroom.console.view_context import Context
from headroom.console.views.pending import not_tried
from headroom.contract.annotations import POLICY, VRAM
from headroom.contract.commands import command
from headroom.contract.kube import (
    Container,
    ObjectMeta,
    Pod,
    PodSpec,
    ResourceRequirements,
    Toleration,
)
from headroom.contract.quantity import gib
from headroom.core.cluster.cluster import Cluster
from headroom.core.journal.journal import STOCK_SCHEDULER, scheduler_of
from headroom.core.placement.request import Unreadable, VramRequest

#: Namespace of hypothetical pods.
NAMESPACE = "default"


class StrictModel(View):
    model_config = ConfigDict(extra="forbid")


class PodsAsked(StrictModel):
    """``count`` equal pods, described by a size or by a manifest."""

    count: int = Field(1, ge=1)
    vram: str = Field("", max_length=256, description="As in headroom.gpu/vram.")
    gpus: int = Field(1, ge=1, le=1024, description="GPUs of each pod.")
    resource: str = Field(
        "",
        max_length=256,
        description="Extended resource; default: the first of the setting resources that has no "
        "wildcard.",
    )
    policy: Literal["", "pack", "spread", "fragmentation"] = Field(
        "", description="As in headroom.gpu/policy."
    )
    manifest: dict[str, Any] | None = Field(
        None, description="A pod as the API server returns it, instead of the size."
    )


@dataclass(frozen=True, slots=True)
class NewPod:
    """A pod that a what-if places: a new pod, or a pod that leaves a drained node."""

    request: VramRequest
    #: Its selectors, affinity and tolerations decide where it may run.
    pod: Pod
    #: The drained node that the pod leaves; None for a new pod.
    leaves: str | None = None
    #: Why no scheduler tries the pod; "" if one does.
    not_tried: str = ""
    #: Whether ResourceQuotas apply. A pod without a manifest is in no real namespace.
    counted: bool = True

    @property
    def name(self) -> str:
        return f"{self.request.namespace}/{self.request.name}"


def made_up(
    name: str, vram: str, gpus: int, resource: str, policy: str = "", tolerates: Sequence[str] = ()
) -> Pod:
    """Return a hypothetical pod with one container. Without ``vram`` it has no memory annotation.

    It tolerates taints whose key is in ``tolerates``, its resource, or ``nvidia.com/gpu``. GPU
    nodes often have a taint with the resource name, which the admission plugin
    ExtendedResourceToleration makes every pod tolerate."""
    annotations = {key: text for key, text in ((VRAM, vram), (POLICY, policy)) if text}
    main = Container(name="main", resources=ResourceRequirements(limits={resource: str(gpus)}))
    metadata = ObjectMeta(name=name, namespace=NAMESPACE, uid=name, annotations=annotations)
    keys = filter(None, dict.fromkeys((resource, "nvidia.com/gpu", *tolerates)))
    tolerations = [Toleration(key=key, operator="Exists") for key in keys]
    return Pod(metadata=metadata, spec=PodSpec(containers=[main], tolerations=tolerations))


def understood(cluster: Cluster, pod: Pod, where: str) -> VramRequest:
    """Return the request of the pod.

    Raises ``HTTPException`` 422 if the request cannot be read or contains no managed GPU. The
    error names ``where``, which states where the pod came from.
    """
    request = cluster.understand(pod)
    if isinstance(request, Unreadable):
        raise HTTPException(422, f"{where}: {request.message}")
    if not request.asks:
        managed = ", ".join(cluster.rules.resources)
        raise HTTPException(
            422,
            f"{where}: requests no GPU that Headroom manages (setting resources: {managed}). "
            f"Example: {usual_resource(cluster)}",
        )
    return request


def of_size(request: VramRequest) -> VramRequest:
    """Return a hypothetical pod's request with the gate that the webhook would add to the pod."""
    return replace(request, gated=True)


def usual_resource(cluster: Cluster) -> str:
    """Return the first resource in the settings without a wildcard, otherwise nvidia.com/gpu."""
    exact = (name for name in cluster.rules.resources if not name.endswith("*"))
    return next(exact, "nvidia.com/gpu")


def pod_named(context: Context, namespace: str, name: str) -> Pod:
    """Return the pod from the watch, or else from its last filter call on record.

    Raises ``HTTPException`` 404 if the pod is in neither.
    """
    decision = context.journal.of_pod(namespace, name)
    watched = context.cluster.pod_named(namespace, name)
    pod = watched or (decision.pod if decision else None)
    if pod is None:
        raise HTTPException(
            404,
            _unreserved_use(context.cluster, namespace, name)
            or f"pod {namespace}/{name} is not known: Headroom watches only pods that request "
            f"{', '.join(context.cluster.rules.resources)}. If it does not exist, the API "
            "server may have rejected it, for example by a ResourceQuota: "
            + command("kubectl", "-n", namespace, "get", "events"),
        )
    return pod


def _unreserved_use(cluster: Cluster, namespace: str, name: str) -> str:
    """Return how much GPU memory the pod uses although it requests no managed GPU, as a sentence;
    "" if no report shows it."""
    for gpunode in cluster.gpunodes():
        status = gpunode.status
        uses = [
            use
            for use in (status.pods if status else ())
            if (use.namespace, use.name) == (namespace, name)
        ]
        if uses:
            used = gib(sum(use.used_bytes or 0 for use in uses), up=True)
            return (
                f"pod {namespace}/{name} uses {used} of the GPUs of node {gpunode.name} without a "
                "reservation: it requests none of the resources that Headroom manages "
                f"({', '.join(cluster.rules.resources)}). Let it request one of them, or end it"
            )
    return ""


def new_pods(
    cluster: Cluster, asked: PodsAsked, number: int, schedulers: Sequence[str]
) -> Iterator[NewPod]:
    """Yield the ``count`` equal pods of the entry with index ``number`` in the list ``pods``.

    Raises ``HTTPException`` 422.
    """
    where, why = f"body pods.{number}", ""
    if asked.manifest is None:
        name, resource = f"asked-{number}", asked.resource or usual_resource(cluster)
        pod = made_up(name, asked.vram, asked.gpus, resource, asked.policy)
    else:
        if asked.vram or asked.resource or asked.policy or asked.gpus != 1:
            raise HTTPException(
                422, f"{where}: the manifest contains the size; remove all other fields but count"
            )
        pod = of_manifest(asked.manifest, f"{where}.manifest", f"asked-{number}")
        why = new_not_tried(cluster, pod, schedulers)
    request = understood(cluster, pod, where)
    if asked.manifest is None:
        request = of_size(request)
    for n in range(asked.count):
        # Each pod needs its own uid, because the uid decides between equal scores.
        suffix = f"-{n}" if asked.count > 1 else ""
        one = replace(request, uid=f"{request.uid}{suffix}", name=f"{request.name}{suffix}")
        yield NewPod(one, pod, None, why, asked.manifest is not None)


def new_not_tried(cluster: Cluster, pod: Pod, schedulers: Sequence[str]) -> str:
    """Return why no scheduler that calls Headroom will try a pod that does not exist yet, or an
    empty string if one will.

    When the pod is created, the webhook sets the scheduler if the pod names none, except in a
    namespace that is exempt.
    """
    set_by_webhook = scheduler_of(pod) == STOCK_SCHEDULER and not cluster.namespaces.are_exempt(
        pod.metadata.namespace
    )
    found = not_tried(pod, set_by_webhook, schedulers, "set")
    return found[1] if found else ""


def of_manifest(manifest: Mapping[str, Any], where: str, name: str) -> Pod:
    """Return the new pod of a manifest, with ``name`` as its uid, and as its name if it has none.

    Raises ``HTTPException`` 422 if the manifest is not a new pod. The error names ``where``, the
    place of the manifest in the request.
    """
    try:
        pod = msgspec.convert(manifest, Pod)
    except (msgspec.ValidationError, RecursionError) as err:
        raise HTTPException(
            422, f"{where}: {err}; send a pod as printed by kubectl get pod -o json"
        ) from err
    if pod.node:
        raise HTTPException(
            422, f"{where}: remove spec.nodeName: no scheduler places a pod with it"
        )
    metadata = msgspec.structs.replace(
        pod.metadata,
        uid=name,
        name=pod.metadata.name or name,
        namespace=pod.metadata.namespace or NAMESPACE,
    )
    return msgspec.structs.replace(pod, metadata=metadata)
