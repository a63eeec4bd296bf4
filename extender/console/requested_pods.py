"""What callers ask about: a pod of the cluster, or one that is made up and read as if it came."""

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

#: Of a pod that is made up.
NAMESPACE = "default"


def made_up(
    name: str, vram: str, gpus: int, resource: str, policy: str = "", tolerates: Sequence[str] = ()
) -> Pod:
    """One container that asks for so many GPUs; without ``vram`` it says nothing of its memory.

    It tolerates taints with these keys, and those with the name of its resource as their key: GPU
    nodes often have such a taint, and the admission plugin ExtendedResourceToleration adds the
    toleration to every pod.
    """
    annotations = {key: text for key, text in ((VRAM, vram), (POLICY, policy)) if text}
    main = Container(name="main", resources=ResourceRequirements(limits={resource: str(gpus)}))
    metadata = ObjectMeta(name=name, namespace=NAMESPACE, uid=name, annotations=annotations)
    keys = filter(None, dict.fromkeys((resource, "nvidia.com/gpu", *tolerates)))
    tolerations = [Toleration(key=key, operator="Exists") for key in keys]
    return Pod(metadata=metadata, spec=PodSpec(containers=[main], tolerations=tolerations))


def understood(cluster: ClusterState, pod: Pod, where: str) -> VramRequest:
    """What the pod asks for. Refuses with 422, naming ``where`` it was asked, what cannot be read
    and what asks for no GPU."""
    request = cluster.understand(pod)
    if isinstance(request, Unreadable):
        raise HTTPException(422, f"{where}: {request.message}")
    if not request.asks:
        managed = ", ".join(cluster.rules.resources)
        raise HTTPException(
            422,
            f"{where}: no GPU is asked for that Headroom manages (setting resources: {managed}); "
            f"right is, for example, {usual_resource(cluster)}",
        )
    return request


def of_size(request: VramRequest) -> VramRequest:
    """As the webhook would have it: it gives every pod its gate."""
    return replace(request, gated=True)


def usual_resource(cluster: ClusterState) -> str:
    """The first that the settings name whole."""
    whole = (name for name in cluster.rules.resources if not name.endswith("*"))
    return next(whole, "nvidia.com/gpu")


def pod_named(context: Context, namespace: str, name: str) -> Pod:
    """As the cluster told of it, or kube-scheduler; 404 where neither did."""
    decision = context.journal.of_pod(namespace, name)
    seen = context.cluster.pod_named(namespace, name)
    pod = seen or (decision.pod if decision else None)
    if pod is None:
        raise HTTPException(
            404,
            f"pod {namespace}/{name} is not known: Headroom knows pods that request "
            f"{', '.join(context.cluster.rules.resources)}. If it does not exist, the API "
            "server may have rejected it, for example by a ResourceQuota: kubectl -n "
            f"{namespace} get events",
        )
    return pod
