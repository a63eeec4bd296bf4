"""Pods that callers ask about: existing pods, and hypothetical ones."""

from collections.abc import Sequence
from dataclasses import replace

from fastapi import HTTPException

from contract.annotations import POLICY, VRAM
from contract.kube import (
    Container,
    ObjectMeta,
    Pod,
    PodSpec,
    ResourceRequirements,
    Toleration,
)
from extender.console.context import Context
from extender.placement.request import Unreadable, VramRequest
from extender.state.cluster_state import ClusterState

#: Namespace of hypothetical pods.
NAMESPACE = "default"


def made_up(
    name: str, vram: str, gpus: int, resource: str, policy: str = "", tolerates: Sequence[str] = ()
) -> Pod:
    """Return a hypothetical pod with one container; without ``vram`` it has no memory annotation.

    It tolerates taints with the keys ``tolerates``. It also tolerates taints with its resource as
    the key: GPU nodes often have such a taint, and the admission plugin ExtendedResourceToleration
    adds the toleration to every pod.
    """
    annotations = {key: text for key, text in ((VRAM, vram), (POLICY, policy)) if text}
    main = Container(name="main", resources=ResourceRequirements(limits={resource: str(gpus)}))
    metadata = ObjectMeta(name=name, namespace=NAMESPACE, uid=name, annotations=annotations)
    keys = filter(None, dict.fromkeys((resource, "nvidia.com/gpu", *tolerates)))
    tolerations = [Toleration(key=key, operator="Exists") for key in keys]
    return Pod(metadata=metadata, spec=PodSpec(containers=[main], tolerations=tolerations))


def understood(cluster: ClusterState, pod: Pod, where: str) -> VramRequest:
    """Return the request of the pod.

    Raises ``HTTPException`` 422, which names ``where``, if it cannot be read or requests no GPU.
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
    """Return the request as the webhook would change it: with the gate."""
    return replace(request, gated=True)


def usual_resource(cluster: ClusterState) -> str:
    """Return the first resource of the settings without a wildcard."""
    whole = (name for name in cluster.rules.resources if not name.endswith("*"))
    return next(whole, "nvidia.com/gpu")


def pod_named(context: Context, namespace: str, name: str) -> Pod:
    """Return the pod, watched or from its last filter call; raises ``HTTPException`` 404."""
    decision = context.journal.of_pod(namespace, name)
    seen = context.cluster.pod_named(namespace, name)
    pod = seen or (decision.pod if decision else None)
    if pod is None:
        raise HTTPException(
            404,
            f"pod {namespace}/{name} is not known: Headroom watches only pods that request "
            f"{', '.join(context.cluster.rules.resources)}. If it does not exist, the API "
            "server may have rejected it, for example by a ResourceQuota: kubectl -n "
            f"{namespace} get events",
        )
    return pod
