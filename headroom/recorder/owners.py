"""Finds the owner of a pod, which is at the end of the chain of controllers in its ownerReferences.

The rule is the same for all kinds. Objects of the kinds in ``RESOURCES`` are read to find their own
controllers. The chain ends at any other kind. Objects of the kinds in ``PER_RUN`` are created again
for each run, so the owner is their family (``core.recommend.families``).
"""

from dataclasses import dataclass

from headroom.contract.kube import OwnerReference
from headroom.contract.vramprofile import ProfileOwner
from headroom.core.recommend.families import family
from headroom.recorder.pod_facts import PodFacts

#: The resources of the kinds that can be between a pod and its owner, by API group and kind.
RESOURCES: dict[tuple[str, str], str] = {
    ("apps", "ReplicaSet"): "replicasets",
    ("batch", "Job"): "jobs",
    ("argoproj.io", "Workflow"): "workflows",
    ("kubeflow.org", "PyTorchJob"): "pytorchjobs",
    ("kubeflow.org", "TFJob"): "tfjobs",
    ("kubeflow.org", "MPIJob"): "mpijobs",
    ("trainer.kubeflow.org", "TrainJob"): "trainjobs",
    ("jobset.x-k8s.io", "JobSet"): "jobsets",
    ("ray.io", "RayCluster"): "rayclusters",
    ("ray.io", "RayJob"): "rayjobs",
}
#: Kinds for which each run is a new object.
PER_RUN = frozenset(
    {"Pod", "Job", "Workflow", "PyTorchJob", "TFJob", "MPIJob", "TrainJob", "JobSet"}
    | {"RayCluster", "RayJob", "XGBoostJob", "PaddleJob", "VCJob"}
)
#: Maximum length of a chain. Real chains are shorter, and a longer chain is a cycle.
MAX_CHAIN = 5


@dataclass(frozen=True, slots=True)
class Controller:
    """An object that controls pods or other objects."""

    api_version: str
    kind: str
    name: str
    generate_name: str = ""
    uid: str = ""


def resource_of(controller: OwnerReference) -> str | None:
    """Return the API resource of the controller, or None if the chain ends at its kind."""
    return RESOURCES.get((group(controller.api_version), controller.kind))


def group(api_version: str) -> str:
    """Return the API group of an apiVersion. It is empty for the core group."""
    return api_version.rpartition("/")[0]


def owner_of(pod: PodFacts, end: Controller | None) -> ProfileOwner:
    """Return the owner of a pod. ``end`` is the end of the pod's chain of controllers, or None if
    the pod has no controller."""
    if end is None:
        return ProfileOwner(
            kind="Pod", name=family(pod.name, pod.generate_name), api_version="v1", family=True
        )
    if end.kind in PER_RUN:
        name = family(end.name, end.generate_name)
        return ProfileOwner(kind=end.kind, name=name, api_version=end.api_version, family=True)
    return ProfileOwner(kind=end.kind, name=end.name, api_version=end.api_version)
