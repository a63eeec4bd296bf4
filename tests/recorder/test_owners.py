"""Tests how the owner of a pod is found through its controllers, and how families and profiles are
named.
"""

import json
from typing import Any

import msgspec
import pytest

from headroom.contract.kube import OwnerReference
from headroom.contract.vramprofile import ProfileOwner, profile_name
from headroom.core.recommend.families import family
from headroom.recorder.kube_profiles import OwnerReader
from headroom.runtime.kube.api_errors import ApiStatus, NoAnswer
from tests.recorder.facts import REPLICA_SET, facts


class Objects:
    """A fake API server with the metadata of some objects."""

    def __init__(self, objects: dict[str, Any]) -> None:
        self.objects, self.asked = objects, []

    def call(self, method: str, path: str, **_: Any) -> bytes:
        assert method == "GET"
        self.asked.append(path)
        answer = self.objects.get(path, 404)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, int):
            raise ApiStatus(path, answer, "")
        return json.dumps({"metadata": answer}).encode()


def reference(kind: str, name: str, api_version: str) -> dict[str, Any]:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "name": name,
        "uid": f"uid of {name}",
        "controller": True,
    }


RS = "/apis/apps/v1/namespaces/team/replicasets/llm-5d4f"


def test_a_deployment_owns_the_pods_of_its_replica_sets() -> None:
    server = Objects(
        {RS: {"uid": "rs-1", "ownerReferences": [reference("Deployment", "llm", "apps/v1")]}}
    )
    reader = OwnerReader(server)  # type: ignore[arg-type]
    owner, to = reader.owner(facts())
    assert owner == ProfileOwner(kind="Deployment", name="llm", api_version="apps/v1")
    assert to == OwnerReference(
        api_version="apps/v1", kind="Deployment", name="llm", uid="uid of llm"
    )
    assert profile_name(owner) == "deployment-llm"
    reader.owner(facts(name="another-pod"))
    assert server.asked == [RS]  # Each ReplicaSet is read once.


def test_a_foreign_uid_in_an_owner_reference_changes_no_owner_in_that_namespace() -> None:
    """The author of a pod can write any name, and the UID of a controller in another namespace."""
    reader = OwnerReader(Objects({RS: {"uid": "rs-1"}}))  # type: ignore[arg-type]
    forged = msgspec.structs.replace(REPLICA_SET, name="forged")
    reader.owner(facts(controller=forged, namespace="evil"))
    assert reader.owner(facts())[0].name == "llm-5d4f"


@pytest.mark.parametrize("status", [403, 404])
def test_an_unreadable_controller_counts_as_the_owner(status: int) -> None:
    owner, to = OwnerReader(Objects({RS: status})).owner(facts())  # type: ignore[arg-type]
    assert (owner.kind, owner.name) == ("ReplicaSet", "llm-5d4f")
    assert to is not None
    assert to.uid == "rs-1"


def test_a_pod_of_another_namespace_cannot_change_the_owner_of_a_controller() -> None:
    """The author of a pod writes its owner reference, and can copy the UID of a controller in
    another namespace.
    """
    server = Objects(
        {RS: {"uid": "rs-1", "ownerReferences": [reference("Deployment", "llm", "apps/v1")]}}
    )
    reader = OwnerReader(server)  # type: ignore[arg-type]
    first, _ = reader.owner(facts(namespace="attacker"))
    assert (first.kind, first.name) == ("ReplicaSet", "llm-5d4f")
    owner, _ = reader.owner(facts())
    assert (owner.kind, owner.name) == ("Deployment", "llm")


def test_a_failed_call_is_not_cached() -> None:
    server = Objects({RS: NoAnswer("timeout")})
    reader = OwnerReader(server)  # type: ignore[arg-type]
    with pytest.raises(NoAnswer):
        reader.owner(facts())
    server.objects[RS] = {"uid": "rs-1"}
    assert reader.owner(facts())[0].name == "llm-5d4f"


def test_another_object_with_the_same_name_is_not_followed() -> None:
    server = Objects(
        {RS: {"uid": "rs-2", "ownerReferences": [reference("Deployment", "x", "apps/v1")]}}
    )
    assert OwnerReader(server).owner(facts())[0].name == "llm-5d4f"  # type: ignore[arg-type]


CHAINS: list[Any] = [
    pytest.param(
        [("batch/v1", "Job", "jobs", "nightly-29012345"), ("batch/v1", "CronJob", "", "nightly")],
        ProfileOwner(kind="CronJob", name="nightly", api_version="batch/v1"),
        id="CronJob",
    ),
    pytest.param(
        [("batch/v1", "Job", "jobs", "train-20261125")],
        ProfileOwner(kind="Job", name="train", api_version="batch/v1", family=True),
        id="Jobs with one generated name",
    ),
    pytest.param(
        [
            ("argoproj.io/v1alpha1", "Workflow", "workflows", "etl-1732570000"),
            ("argoproj.io/v1alpha1", "CronWorkflow", "", "etl"),
        ],
        ProfileOwner(kind="CronWorkflow", name="etl", api_version="argoproj.io/v1alpha1"),
        id="Argo",
    ),
    pytest.param(
        [("kubeflow.org/v1", "PyTorchJob", "pytorchjobs", "bert-x7k2p")],
        ProfileOwner(kind="PyTorchJob", name="bert", api_version="kubeflow.org/v1", family=True),
        id="Kubeflow",
    ),
    pytest.param(
        [
            ("ray.io/v1", "RayCluster", "rayclusters", "serve-raycluster-x7k2p"),
            ("ray.io/v1", "RayService", "", "serve"),
        ],
        ProfileOwner(kind="RayService", name="serve", api_version="ray.io/v1"),
        id="Ray",
    ),
    pytest.param(
        [("example.com/v1", "Notebook", "", "alice")],
        ProfileOwner(kind="Notebook", name="alice", api_version="example.com/v1"),
        id="unknown kind",
    ),
]


@pytest.mark.parametrize(("chain", "owner"), CHAINS)
def test_the_chain_of_controllers_leads_to_the_owner(
    chain: list[tuple[str, str, str, str]], owner: ProfileOwner
) -> None:
    objects = {}
    for (api, _, resource, name), above in zip(chain, [*chain[1:], None], strict=True):
        path = f"/apis/{api}/namespaces/team/{resource}/{name}"
        owners = [reference(above[1], above[3], above[0])] if above else []
        objects[path] = {"uid": f"uid of {name}", "ownerReferences": owners}
    api, kind, _, name = chain[0]
    first = OwnerReference(
        api_version=api, kind=kind, name=name, uid=f"uid of {name}", controller=True
    )
    found, to = OwnerReader(Objects(objects)).owner(facts(controller=first))  # type: ignore[arg-type]
    assert found == owner
    # Otherwise, Kubernetes would delete the profile of a family together with its first owner.
    assert (to is None) == owner.family


def test_an_owner_reference_leads_to_no_other_path() -> None:
    hostile = OwnerReference(
        api_version="apps/v1/../v2", kind="ReplicaSet", name="../../x?a=b", uid="u", controller=True
    )
    server = Objects({})
    OwnerReader(server).owner(facts(controller=hostile))  # type: ignore[arg-type]
    assert server.asked == []
    hostile = OwnerReference(
        api_version="apps/v1", kind="ReplicaSet", name="../../x?a=b", uid="v", controller=True
    )
    OwnerReader(server).owner(facts(controller=hostile))  # type: ignore[arg-type]
    assert server.asked == ["/apis/apps/v1/namespaces/team/replicasets/..%2F..%2Fx%3Fa%3Db"]


def test_a_cycle_of_owners_is_not_followed_forever() -> None:
    loop = {
        "uid": "rs-1",
        "ownerReferences": [{**reference("ReplicaSet", "llm-5d4f", "apps/v1"), "uid": "rs-1"}],
    }
    assert OwnerReader(Objects({RS: loop})).owner(facts())[0].name == "llm-5d4f"  # type: ignore[arg-type]


def test_a_pod_without_a_controller_belongs_to_a_family() -> None:
    pod = facts(controller=None, name="jupyter-alice", generate_name="")
    owner, to = OwnerReader(Objects({})).owner(pod)  # type: ignore[arg-type]
    assert (owner, to) == (
        ProfileOwner(kind="Pod", name="jupyter-alice", api_version="v1", family=True),
        None,
    )


@pytest.mark.parametrize(
    ("name", "generate_name", "expected"),
    [
        ("train-x7k2p", "train-", "train"),
        ("train-20261125", "", "train"),
        ("train-2026-1125-x7k2p", "", "train"),
        ("train-7c9e6679-7425-40de-944b-e07fc1f90ae7", "", "train"),
        ("llama-3-8b", "", "llama-3-8b"),
        ("train-large", "", "train-large"),
        ("train-v1000", "", "train-v1000"),
        ("stable-diffusion3", "", "stable-diffusion3"),
        ("jupyter-alice", "", "jupyter-alice"),
        ("20261125", "", "20261125"),
    ],
)
def test_the_family_is_derived_from_the_name(name: str, generate_name: str, expected: str) -> None:
    assert family(name, generate_name) == expected


def test_names_of_profiles_are_valid_and_unique() -> None:
    owners = [
        ProfileOwner(kind="Deployment", name="llm", api_version="apps/v1"),
        ProfileOwner(kind="Job", name="llm", api_version="batch/v1"),
        ProfileOwner(kind="Job", name="llm", api_version="batch.volcano.sh/v1alpha1"),
        ProfileOwner(kind="Job", name="llm.a", api_version="batch/v1"),
        ProfileOwner(kind="Job", name="llm-a", api_version="batch/v1"),
        ProfileOwner(kind="Deployment", name="x" * 253, api_version="apps/v1"),
        ProfileOwner(kind="Deployment", name="x" * 252 + "y", api_version="apps/v1"),
    ]
    names = [profile_name(owner) for owner in owners]
    assert names[:2] == ["deployment-llm", "job-llm"]
    assert names[2].startswith("job-llm-")
    assert len(set(names)) == len(names)
    assert all(len(name) <= 253 for name in names)
