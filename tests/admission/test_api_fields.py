"""Compares the fields and resources in the admission policies with the API of each Kubernetes
version.

If a new version of Kubernetes adds a field, these tests fail until a list below contains the field.
``python -m tests.admission.api_fields`` records the names of all fields.
"""

import json
import re
from typing import Any

import msgspec
import pytest
import yaml

from headroom.contract.kube import InitContainer
from tests.admission.api_fields import FILE
from tests.controlplane import ROOT

FIELDS: dict[str, dict[str, list[str]]] = json.loads(FILE.read_text())
MINORS = sorted(FIELDS)

#: Fields of a pod's status that kube-scheduler writes. It uses the account of the extender, and the
#: policy headroom-extender-pods limits the writes of this account.
OF_KUBE_SCHEDULER = {
    "conditions",
    "nominatedNodeName",
    # Claims that kube-scheduler allocates for extended resources (DRAExtendedResource).
    "extendedResourceClaimStatus",
    # CPU and memory that DRA devices need (DRANodeAllocatableResources).
    "nodeAllocatableResourceClaimStatuses",
}
OF_OTHERS = {
    # Fields that the kubelet writes.
    *("observedGeneration", "phase", "message", "reason", "hostIP", "hostIPs", "podIP", "podIPs"),
    *("startTime", "initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses"),
    *("resize", "allocatedResources", "resources", "volumeHealth"),
    # A field that the API server sets when the pod is created.
    "qosClass",
    # A field that the ResourceClaim controller writes.
    "resourceClaimStatuses",
}
#: Fields of metadata that the policy compares. ``OF_THE_API_SERVER`` has the other fields, which
#: clients cannot change or which change with every write.
COMPARED = {"labels", "annotations", "ownerReferences", "finalizers"}
OF_THE_API_SERVER = {
    *("name", "generateName", "namespace", "selfLink", "uid", "resourceVersion", "generation"),
    *("creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "managedFields"),
}
#: Subresources whose requests do not contain the metadata of the pod.
WITHOUT_METADATA = {f"pods/{name}" for name in ("attach", "eviction", "exec", "log", "portforward")}
WITHOUT_METADATA |= {"pods/proxy"}


def policy(name: str) -> dict[str, Any]:
    text = (ROOT / "deploy/base/admission.yaml").read_text()
    documents = yaml.load_all(text, yaml.CSafeLoader)
    (spec,) = (
        each["spec"]
        for each in documents
        if each["kind"] == "ValidatingAdmissionPolicy" and each["metadata"]["name"] == name
    )
    found: dict[str, Any] = spec
    return found


def listed(name: str, variable: str) -> set[str]:
    """Return the keys in a variable of a policy, which has one list such as ``["a", "b"]``."""
    (expression,) = (
        each["expression"] for each in policy(name)["variables"] if each["name"] == variable
    )
    lists = {tuple(re.findall(r'"(\w+)"', each)) for each in re.findall(r"\[(\".+?)\]", expression)}
    (only,) = {each for each in lists if len(each) > 1}
    return set(only)


def resources(name: str) -> set[str]:
    """Return the resources that a policy covers."""
    rules = policy(name)["matchConstraints"]["resourceRules"]
    return {each for rule in rules for each in rule["resources"]}


@pytest.mark.parametrize("minor", MINORS)
class TestMinors:
    def test_every_field_of_a_pods_status_has_a_writer(self, minor: str) -> None:
        unknown = set(FIELDS[minor]["PodStatus"]) - OF_KUBE_SCHEDULER - OF_OTHERS
        assert not unknown, "who writes them? see pkg/scheduler of Kubernetes"

    def test_every_field_of_metadata_is_compared_or_cannot_change(self, minor: str) -> None:
        assert not set(FIELDS[minor]["ObjectMeta"]) - COMPARED - OF_THE_API_SERVER

    def test_a_binding_has_only_metadata_and_a_target(self, minor: str) -> None:
        assert set(FIELDS[minor]["Binding"]) == {"metadata", "target"}

    def test_every_field_of_a_container_is_decoded_to_recognise_a_gate(self, minor: str) -> None:
        """A field that is not decoded could change the behaviour of a container that looks like a
        gate.
        """
        decoded = {field.encode_name for field in msgspec.structs.fields(InitContainer)}
        assert not set(FIELDS[minor]["Container"]) - decoded

    def test_a_node_reports_its_resources_in_two_fields(self, minor: str) -> None:
        allows = listed("headroom-extender-nodes", "foreign")
        assert allows == {"capacity", "allocatable"}
        assert allows <= set(FIELDS[minor]["NodeStatus"])

    @pytest.mark.parametrize("name", ["headroom-pod-annotations", "headroom-extender-pods"])
    def test_the_policy_covers_all_resources_that_write_pods(self, minor: str, name: str) -> None:
        assert set(FIELDS[minor]["pods"]) - WITHOUT_METADATA <= resources(name)


def test_the_account_of_the_extender_may_write_what_kube_scheduler_writes() -> None:
    assert listed("headroom-extender-pods", "written") == OF_KUBE_SCHEDULER
    newest = MINORS[-1]
    assert set(FIELDS[newest]["PodStatus"]) >= OF_KUBE_SCHEDULER


@pytest.mark.parametrize("name", ["headroom-pod-annotations", "headroom-extender-pods"])
def test_the_policy_lists_only_existing_resources(name: str) -> None:
    assert resources(name) <= {each for fields in FIELDS.values() for each in fields["pods"]}


@pytest.mark.parametrize("field", sorted(COMPARED))
def test_the_policy_of_the_extender_compares_metadata(field: str) -> None:
    spec = policy("headroom-extender-pods")
    expressions = [each["expression"] for each in (*spec["variables"], *spec["validations"])]
    assert any(f"metadata.?{field}" in each for each in expressions)
