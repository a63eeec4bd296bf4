"""Tests the exact text of the errors and warnings that an author gets."""

import copy
import json
from collections.abc import Mapping
from typing import Any

import pytest

from headroom.contract.gate import gate_container
from headroom.core.placement.request import Unreadable, understand
from headroom.webhook.context import AdmissionContext
from headroom.webhook.review import answer_mutate, answer_validate, read
from tests.admission.reviews import (
    ADMIN,
    GATE_IMAGE,
    KUBELET,
    STATIC,
    around,
    container,
    manifest,
    mutated,
    node,
    pod,
    review,
)
from tests.builders import shared

VRAM = "headroom.gpu/vram"


def answer(where: AdmissionContext, obj: Mapping[str, Any], **of_review: Any) -> dict[str, Any]:
    body = json.dumps(review(obj, **of_review)).encode()
    response: dict[str, Any] = json.loads(answer_validate(read(body), lambda name: where))
    return dict(response["response"])


def rejection(
    obj: Mapping[str, Any], where: AdmissionContext | None = None, **of_review: Any
) -> str:
    """Return the message with which the object is rejected, or an empty string if it is
    admitted.
    """
    response = answer(where or around(), obj, **of_review)
    assert response["allowed"] is ("status" not in response)
    message: str = response.get("status", {}).get("message", "")
    return message


def warnings(
    obj: Mapping[str, Any], where: AdmissionContext | None = None, **of_review: Any
) -> list[str]:
    response = answer(where or around(), obj, **of_review)
    assert response["allowed"]
    told: list[str] = response.get("warnings", [])
    return told


def annotated(**of_users: str) -> dict[str, Any]:
    given = {f"headroom.gpu/{key.replace('_', '-')}": text for key, text in of_users.items()}
    return manifest(None, annotations=given)


@pytest.mark.parametrize(
    "obj",
    [
        pytest.param(annotated(vram="8Gi", policy="spread", max_sm="70%"), id="valid"),
        pytest.param(manifest(None), id="no annotation"),
        pytest.param(manifest("8GB", container(gpus=0)), id="no GPU"),
    ],
)
def test_a_valid_pod_is_admitted(obj: dict[str, Any]) -> None:
    """test_documented checks the messages of rejections, because docs/design/admission.md contains
    them.
    """
    assert rejection(obj) == ""


def test_the_rejection_describes_a_webhook_that_puts_its_container_before_the_gate() -> None:
    gates = [container("istio-proxy", 0), gate_container(GATE_IMAGE)]
    obj = manifest("8Gi", annotations={"headroom.gpu/gated": "true"}, initContainers=gates)
    assert rejection(obj, around(gate_image=GATE_IMAGE)) == (
        "Headroom: annotation headroom.gpu/gated is 'true' and the pod has no gate: another webhook"
        " put init container 'istio-proxy' before it; set the reinvocationPolicy of that webhook to"
        " Never"
    )


def test_only_a_kubelet_can_create_a_static_pod() -> None:
    obj = manifest("8GB", nodeName="n", annotations=STATIC)
    assert rejection(obj, user=KUBELET) == ""
    users = (
        ADMIN,
        {**ADMIN, "username": "system:node:n"},
        {**KUBELET, "username": "t"},
        {**KUBELET, "username": "system:node:m"},
        {**KUBELET, "username": "system:node:"},
    )
    for user in users:
        assert "headroom.gpu/vram" in rejection(obj, user=user)


def test_the_extender_rejects_an_invalid_pod_with_the_same_message() -> None:
    for obj in (annotated(vram="8GB"), annotated(vram="a=1"), annotated(vram="1Gi", policy="x")):
        found = understand(pod(obj), None, around().rules)
        assert isinstance(found, Unreadable)
        assert rejection(obj) == f"Headroom: {found.message}"


def test_an_invalid_default_is_reported_with_its_namespace() -> None:
    where = around(annotations={"headroom.gpu/default-vram": "4GB"})
    assert rejection(manifest(None), where).startswith(
        "Headroom: namespace team-a: annotation headroom.gpu/default-vram: '4GB' is not valid"
    )
    assert rejection(manifest("4Gi"), where) == ""


class TestChanges:
    @pytest.mark.parametrize(
        ("before", "after", "rejected"),
        [
            pytest.param(manifest("8Gi"), manifest("9GB"), True, id="invalid annotation"),
            pytest.param(manifest("8Gi"), manifest("9Gi"), False, id="valid annotation"),
            pytest.param(manifest("9GB"), manifest("9GB"), False, id="another field"),
            pytest.param(
                manifest("8Gi", nodeName="n"),
                manifest("9GB", nodeName="n"),
                False,
                id="bound: the policy rejects it",
            ),
        ],
    )
    def test_a_change_of_a_pod_is_accepted_or_rejected(
        self, before: Any, after: Any, rejected: bool
    ) -> None:
        assert bool(rejection(after, operation="UPDATE", old=before)) is rejected

    def test_a_terminating_pod_can_always_be_changed(self) -> None:
        going = manifest("9GB")
        going["metadata"]["deletionTimestamp"] = "2026-11-21T00:00:00Z"
        assert rejection(going, operation="UPDATE", old=manifest("8Gi")) == ""

    def test_deletions_are_not_checked(self) -> None:
        body = json.dumps(review(None, operation="DELETE", old=manifest("9GB"))).encode()
        for decide in (answer_validate, answer_mutate):
            response = json.loads(decide(read(body), lambda name: around()))["response"]
            assert response["allowed"] is True


def workload(kind: str, template: dict[str, Any], **annotations: str) -> dict[str, Any]:
    inner: dict[str, Any] = {
        "template": {"metadata": template["metadata"], "spec": template["spec"]}
    }
    spec = {"jobTemplate": {"spec": inner}} if kind == "CronJob" else inner
    return {"kind": kind, "metadata": {"name": "w", "annotations": annotations}, "spec": spec}


class TestTemplates:
    @pytest.mark.parametrize(
        "kind",
        [
            "Deployment",
            "StatefulSet",
            "DaemonSet",
            "ReplicaSet",
            "ReplicationController",
            "Job",
            "CronJob",
        ],
    )
    def test_a_mistake_in_a_template_is_reported_at_once(self, kind: str) -> None:
        obj = workload(kind, annotated(vram="8GB"))
        (told,) = warnings(obj, kind=kind)
        assert told.startswith(
            f"Headroom: pods of this {kind} will be rejected: annotation headroom.gpu/vram: '8GB'"
        )
        assert warnings(workload(kind, annotated(vram="8Gi")), kind=kind) == []

    def test_an_object_of_another_kind_is_admitted(self) -> None:
        assert warnings({"metadata": {"name": "x"}, "spec": {"replicas": 1}}, kind="Scale") == []


@pytest.mark.parametrize(
    "key", ["headroom.gpu/VRAM", "headroom.io/vram", "headrom.gpu/vram", "headroom.gpu/memory"]
)
def test_a_misspelt_annotation_gets_a_warning(key: str) -> None:
    (told,) = warnings(manifest(annotations={key: "8Gi"}))
    assert told.endswith("did you mean headroom.gpu/vram?")


@pytest.mark.parametrize("prefix", ["headroom-labs.example/owner", "headroomed"])
def test_annotations_of_others_are_not_reported(prefix: str) -> None:
    assert warnings(manifest("8Gi", annotations={prefix: "x"})) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8", "8 bytes"),
        ("8m", "1 byte"),
        ("8000", "8,000 bytes"),
        ("1023Ki", "1,047,552 bytes"),
        ("main=8", "8 bytes"),
        ("auto,default=8", "8 bytes"),
        ("auto,default=8Gi,max=20", "20 bytes"),
    ],
)
def test_an_amount_without_its_unit_is_rejected(text: str, count: str) -> None:
    obj = annotated(vram=text)
    why = f"is only {count}; the unit is probably missing. Example: headroom.gpu/vram: 8Gi"
    why = f"annotation headroom.gpu/vram: {text!r} {why}"
    (told, *_) = warnings(workload("Deployment", obj), kind="Deployment")
    assert told == f"Headroom: pods of this Deployment will be rejected: {why}"
    if "auto" not in text:  # The mutating webhook replaces ``auto`` in pods.
        assert rejection(obj) == f"Headroom: {why}"
        assert warnings(obj, around(observes=True))[0].endswith(f"would be rejected: {why}")


@pytest.mark.parametrize(
    ("text", "warned"), [("1Mi", True), ("63Mi", True), ("64Mi", False), ("25%", False)]
)
def test_an_amount_below_a_cuda_context_gets_a_warning(text: str, warned: bool) -> None:
    why = "is less than a CUDA context needs. Example: headroom.gpu/vram: 8Gi"
    expected = [f"Headroom: annotation headroom.gpu/vram: {text!r} {why}"] if warned else []
    assert warnings(annotated(vram=text)) == expected


def test_a_default_without_its_unit_is_reported_to_the_author_of_the_pod() -> None:
    where = around(annotations={"headroom.gpu/default-vram": "4"})
    why = "'4' is only 4 bytes; the unit is probably missing. Example: headroom.gpu/"
    assert rejection(manifest(None), where).startswith(
        f"Headroom: namespace team-a: annotation headroom.gpu/default-vram: {why}"
    )


@pytest.mark.parametrize(
    ("kind", "key", "text", "warned"),
    [
        ("Namespace", "headroom.gpu/default-vram", "4GB", True),
        ("Namespace", "headroom.gpu/default-vram", "4Gi", False),
        ("Namespace", "headroom.gpu/gated", "on", True),
        ("Namespace", "headroom.gpu/share", "all", True),
        ("Node", "headroom.gpu/device-choice", "best", True),
        ("Node", "headroom.gpu/device-choice", "gated", False),
        ("Node", "headroom.gpu/reserve", "-1Gi", True),
        ("Namespace", "headroom.gpu/default-vrma", "4Gi", True),
        ("Namespace", "headroom.gpu/vram", "4Gi", True),
        ("Namespace", "headroom.gpu/scheduler", "none", True),
        ("Namespace", "headroom.gpu/default-vram", "4", True),
        ("Node", "headroom.gpu/cordno", "GPU-1", True),
        ("Node", "headroom.gpu/vram", "4Gi", True),
        ("Node", "headroom.gpu/cordon", "0", True),
        ("Node", "headroom.gpu/cordon", "GPU-1,MIG-2", False),
        ("Node", "headroom.gpu/reserve", "1", True),
        ("Node", "headroom.gpu/reserve", "0", False),
        ("Node", "headroom.gpu/unified-memory", "96", True),
        ("Node", "headroom.gpu/unified-memory", "auto", False),
        ("Node", "headroom.example/note", "x", False),
    ],
)
def test_namespaces_and_nodes_get_warnings(kind: str, key: str, text: str, warned: bool) -> None:
    obj = {"metadata": {"name": "x", "annotations": {key: text}}}
    told = warnings(obj, around(observes=True), kind=kind)
    assert bool(told) is warned
    assert all(key in each for each in told)


@pytest.mark.parametrize(
    ("kind", "key", "wrong"),
    [
        ("Namespace", "headroom.gpu/default-vram", "4GB"),
        ("Namespace", "headroom.gpu/default-vram", "4"),
        ("Namespace", "headroom.gpu/share", "all"),
        ("Node", "headroom.gpu/device-choice", "best"),
        ("Node", "headroom.gpu/reserve", "-1Gi"),
    ],
)
def test_a_change_to_an_invalid_annotation_is_rejected(kind: str, key: str, wrong: str) -> None:
    def of(text: str | None, **more: str) -> dict[str, Any]:
        return {"metadata": {"name": "x", "annotations": more | ({key: text} if text else {})}}

    told = rejection(of(wrong), kind=kind, operation="UPDATE", old=of(None))
    assert told.startswith(f"Headroom: annotation {key}: ")
    # A wrong value on a Node must not block its creation by a cloud controller, or another change.
    assert bool(rejection(of(wrong), kind=kind)) is (kind == "Namespace")
    for old in (of(wrong), of(wrong, note="x")):
        assert key in warnings(of(wrong), kind=kind, operation="UPDATE", old=old)[0]


def test_an_amount_on_the_template_of_a_cronjobs_jobs_gets_a_warning() -> None:
    obj = workload("CronJob", manifest(None))
    obj["spec"]["jobTemplate"]["metadata"] = {"annotations": {VRAM: "8Gi"}}
    assert warnings(obj, kind="CronJob")[0] == (
        "Headroom: annotation headroom.gpu/vram of the template of its Jobs has no effect; "
        "set it in metadata.annotations of the pod template"
    )


def test_long_values_are_shortened_and_the_number_of_warnings_is_limited() -> None:
    shown = rejection(annotated(vram="x" * 100_000))
    assert len(shown) < 400
    many = {f"headroom.gpu/{'k' * 200}{i}": "x" for i in range(100)}
    told = warnings(manifest("8Gi", annotations=many))
    assert len(told) == 12
    assert max(map(len, told)) <= 256


def test_a_gate_written_by_the_mutating_webhook_is_accepted() -> None:
    obj = annotated(vram="8Gi", gated="true")
    where = around(gate_image=GATE_IMAGE)
    assert "set schedulerName: headroom and no nodeName" in rejection(obj, where)


def test_mode_observe_rejects_nothing_and_reports_would_be_rejections() -> None:
    observing = around(observes=True)
    for obj in (annotated(vram="8 GB"), annotated(vram="8Gi", gated="perhaps")):
        told = rejection(obj)
        assert told
        response = answer(observing, obj)
        assert response["allowed"]
        assert response["warnings"][0].startswith(
            "Headroom: in mode enforce, this pod would be rejected: "
        )
    assert answer(observing, annotated(vram="8Gi", gated="true"))["allowed"]


def test_a_pod_beyond_a_limit_is_rejected_with_the_number_and_the_limit() -> None:
    many = manifest("1Gi", *(container(f"c{i}") for i in range(65)))
    assert rejection(many) == (
        "Headroom: pod has 65 containers and init containers, but at most 64 are allowed with a "
        "GPU; use several pods"
    )
    assert rejection(manifest("1Gi", *(container(f"c{i}") for i in range(64)))) == ""
    # The limit does not apply to pods without a GPU.
    assert rejection(manifest(None, *(container(f"c{i}", gpus=0) for i in range(65)))) == ""


def test_the_amount_that_quotas_count_must_equal_the_reserved_amount() -> None:
    where = around(node(devices=[shared()]), counts=True)
    created, _ = mutated(manifest("8Gi"), where)
    assert rejection(created, where) == ""
    raised = copy.deepcopy(created)
    raised["metadata"]["annotations"][VRAM] = "20Gi"
    assert rejection(raised, where, operation="UPDATE", old=created) == (
        "Headroom: container 'main' counts as 8Gi of headroom.gpu/vram-bytes in quotas, and "
        "headroom.gpu/vram requests 20Gi: create the pod again to change it"
    )
    assert rejection(raised, around(), operation="UPDATE", old=created) == ""
    share, _ = mutated(manifest("25%"), where)
    assert rejection(share, where) == ""
    assert rejection(manifest("25%"), where) == (
        "Headroom: container 'main' cannot be counted in quotas: its memory depends on its device, "
        "and no node reports a device of nvidia.com/gpu yet. Example of an amount: "
        "headroom.gpu/vram: 8Gi"
    )
    # In these namespaces nothing is counted, because the API server does not call the mutating
    # webhook.
    unmanaged = around(counts=True, labels={"headroom.gpu/scheduler": "none"})
    assert rejection(manifest("8Gi"), unmanaged) == ""
    # Templates are not counted, because the webhook does not change them.
    workload = {"spec": {"template": manifest("8Gi")}}
    assert warnings(workload, where, kind="Deployment") == []


def test_an_amount_for_a_resource_served_by_dra_as_whole_devices_is_rejected() -> None:
    """The default scheduler does not call the extender for the implicit resource name of a
    DeviceClass.
    """
    name = "deviceclass.resource.kubernetes.io/gpu.nvidia.com"
    obj = manifest("8Gi", container(gpus=0))
    obj["spec"]["containers"][0]["resources"] = {"limits": {name: "1"}}
    assert rejection(obj) == (
        f"Headroom: annotation {VRAM}: DRA allocates {name} in whole devices, and counts no "
        "amount; request nvidia.com/gpu: 1 instead, or convert the pod to claims (headroom convert "
        "--to dra), or remove the annotation"
    )
    assert rejection(obj, around(labels={"headroom.gpu/scheduler": "none"})) == ""
    workload = {"spec": {"template": obj}}
    assert "pods of this Deployment will be rejected" in warnings(workload, kind="Deployment")[0]
    del obj["metadata"]["annotations"][VRAM]
    assert rejection(obj) == ""
