"""Tests reading the minimum and the pods of a group from a real API server."""

from collections.abc import Iterator
from typing import Any

import pytest

from extender.groups.reader import KubeGroups
from headroom.core.groups.membership import Group, GroupKind
from headroom.core.groups.partial import Members
from headroom.runtime.kube.client import KubeApi
from tests.blocking import Blocking, Loop
from tests.controlplane import ApiRefused, ControlPlane
from tests.waiting import until

NAMESPACE = "groups-tests"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
GROUPS = f"/apis/scheduling.x-k8s.io/v1alpha1/namespaces/{NAMESPACE}/podgroups"
TRAIN = Group(GroupKind.COSCHEDULING, NAMESPACE, "train")


@pytest.fixture(scope="module")
def groups(plane: ControlPlane) -> Iterator[Blocking]:
    plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    api = KubeApi(plane.configuration())
    with Loop() as loop:
        yield Blocking(loop, KubeGroups(api))
    api.close()


@pytest.fixture
def podgroups(plane: ControlPlane) -> Iterator[None]:
    """Create the CRD of the Coscheduling plugin, and wait until PodGroups are served."""
    names = {"kind": "PodGroup", "plural": "podgroups", "singular": "podgroup"}
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": "v1alpha1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
    }
    spec = {
        "group": "scheduling.x-k8s.io",
        "names": names,
        "scope": "Namespaced",
        "versions": [version],
    }
    name = "podgroups.scheduling.x-k8s.io"
    approved = {"api-approved.kubernetes.io": "unapproved, for a test"}
    metadata = {"name": name, "annotations": approved}
    plane.call("POST", CRDS, {"metadata": metadata, "spec": spec})
    yield
    plane.call("DELETE", f"{CRDS}/{name}")


def test_a_group_of_the_coscheduling_plugin_has_the_pods_with_its_label(
    plane: ControlPlane, groups: Blocking, podgroups: None
) -> None:
    body = {
        "apiVersion": "scheduling.x-k8s.io/v1alpha1",
        "kind": "PodGroup",
        "metadata": {"name": "train"},
        "spec": {"minMember": 3},
    }
    until(lambda: created(plane, body), "PodGroups are served")
    for name, of in (("train-0", "train"), ("train-1", "train"), ("eval-0", "eval")):
        metadata = {"name": name, "labels": {"scheduling.x-k8s.io/pod-group": of}}
        spec = {"containers": [{"name": "main", "image": "none"}]}
        plane.call("POST", PODS, {"metadata": metadata, "spec": spec})
    found = groups.read(TRAIN)
    assert found.minimum == 3
    assert sorted(pod.metadata.name for pod in found.pods) == ["train-0", "train-1"]
    assert groups.read(TRAIN._replace(name="eval")) == Members(
        None, ()
    )  # This group has only pods.


def created(plane: ControlPlane, body: dict[str, Any]) -> bool:
    try:
        plane.call("POST", GROUPS, body)
    except ApiRefused:
        return False
    return True


@pytest.mark.parametrize("kind", GroupKind)
def test_the_minimum_is_unknown_without_a_pod_group(groups: Blocking, kind: GroupKind) -> None:
    assert groups.read(Group(kind, NAMESPACE, "none")) == Members(None, ())
