"""Memory that ResourceQuotas and Kueue count: in pods, and in the templates of queued Jobs."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from extender.admission.context import AdmissionContext
from extender.admission.review import answer_mutate, read
from tests.admission.reviews import (
    all_containers,
    applied,
    around,
    container,
    manifest,
    mutated,
    node,
    patch_of,
    review,
)
from tests.builders import shared

COUNTED = "headroom.gpu/vram-bytes"
IN_A_QUEUE = {"kueue.x-k8s.io/queue-name": "team"}


def counted(obj: dict[str, Any], *nodes: Any) -> list[str | None]:
    """Count each container as quotas do, after the webhook was called twice."""
    where = around(*nodes, counts=True)
    stored, _ = mutated(mutated(obj, where)[0], where)
    found = []
    for each in all_containers(stored):
        resources = each["resources"]
        assert resources["limits"].get(COUNTED) == resources["requests"].get(COUNTED)
        found.append(resources["limits"].get(COUNTED))
    return found


class TestCounted:
    def test_of_all_devices_in_bytes(self) -> None:
        obj = manifest("8Gi", container(gpus=2), initContainers=[container("init")])
        assert counted(obj) == ["8Gi", "16Gi"]
        assert counted(manifest("8G")) == ["7812500Ki"]
        assert counted(manifest("8Gi", container(gpus=0))) == [None]
        assert mutated(manifest("8Gi"), around())[0]["spec"]["containers"] == [container()]

    @pytest.mark.parametrize("vram", ["1", "1Mi", "512Mi", "1%"])
    def test_a_small_amount_counts_as_what_a_pod_may_use_beyond_it(self, vram: str) -> None:
        small = node("a", devices=[shared(memory_bytes=8 << 30)])
        assert counted(manifest(vram, container(gpus=2)), small) == ["1Gi"]

    def test_an_amount_that_depends_on_the_device_counts_as_on_the_largest(self) -> None:
        small = node("a", devices=[shared(memory_bytes=8 << 30)])
        large = node("b", devices=[shared(memory_bytes=80 << 30, free=8)])
        assert counted(manifest("25%"), small, large) == ["20Gi"]
        # One of 4 replicas of 8 GiB, or one of 8 of 80 GiB; twice.
        assert counted(manifest(None, container(gpus=2)), small, large) == ["20Gi"]
        assert counted(manifest("25%"), node(devices=None)) == [None]

    @pytest.mark.parametrize("lists", [["limits"], ["requests"], ["limits", "requests"]])
    def test_a_value_of_the_author_is_replaced(self, lists: list[str]) -> None:
        own = container()
        for each in lists:
            own["resources"][each][COUNTED] = "1"
        assert counted(manifest("8Gi", own)) == ["8Gi"]


def job(obj: Mapping[str, Any], labels: Mapping[str, str] = IN_A_QUEUE) -> dict[str, Any]:
    """A Job whose pods are like this one."""
    metadata = {"name": "train", "labels": dict(labels)}
    template = {"metadata": obj["metadata"], "spec": obj["spec"]}
    return {"apiVersion": "batch/v1", "metadata": metadata, "spec": {"template": template}}


def queued(obj: dict[str, Any], context: AdmissionContext) -> dict[str, Any]:
    """Return the Job as the API server stores it."""
    body = json.dumps(review(obj, kind="Job")).encode()
    answer = json.loads(answer_mutate(read(body), lambda _: context))
    return applied(obj, patch_of(answer["response"]))


class TestQueuedJobs:
    def test_the_template_counts_as_its_pods_will(self) -> None:
        sent = job(manifest("8Gi", container(gpus=2), initContainers=[container("init")]))
        stored = queued(sent, around(counts=True))
        assert queued(stored, around(counts=True)) == stored
        (main,) = stored["spec"]["template"]["spec"]["containers"]
        (init,) = stored["spec"]["template"]["spec"]["initContainers"]
        assert [main["resources"]["requests"][COUNTED], init["resources"]["limits"][COUNTED]] == [
            "16Gi",
            "8Gi",
        ]
        del main["resources"]["requests"][COUNTED], main["resources"]["limits"][COUNTED]
        del init["resources"]["requests"][COUNTED], init["resources"]["limits"][COUNTED]
        assert stored == sent

    def test_with_the_default_of_the_namespace(self) -> None:
        context = around(counts=True, annotations={"headroom.gpu/default-vram": "6Gi"})
        stored = queued(job(manifest(None)), context)["spec"]["template"]
        (main,) = stored["spec"]["containers"]
        assert main["resources"]["limits"][COUNTED] == "6Gi"
        assert "annotations" not in stored["metadata"]

    def test_auto_counts_as_its_default_and_stays_in_the_template(self) -> None:
        stored = queued(job(manifest("auto,default=5Gi")), around(counts=True))["spec"]["template"]
        (main,) = stored["spec"]["containers"]
        assert main["resources"]["limits"][COUNTED] == "5Gi"
        assert stored["metadata"]["annotations"] == {"headroom.gpu/vram": "auto,default=5Gi"}

    @pytest.mark.parametrize(
        ("obj", "context"),
        [
            (job(manifest("8Gi"), labels={"app": "train"}), around(counts=True)),
            (job(manifest("8Gi")), around()),
            (job(manifest("8Gi", container(gpus=0))), around(counts=True)),
            (job(manifest("8Gj")), around(counts=True)),
        ],
    )
    def test_other_jobs_stay_as_they_are(
        self, obj: dict[str, Any], context: AdmissionContext
    ) -> None:
        assert queued(obj, context) == obj


class TestUncounted:
    """The mutating webhook fails closed, unlike the validating one. So it rejects what cannot be
    counted."""

    @pytest.mark.parametrize(
        ("obj", "reported"),
        [
            pytest.param(manifest("20 GiB please"), "'20 GiB please' is not valid", id="an amount"),
            pytest.param(
                manifest("8Gi", *(container(f"c{i}") for i in range(70))),
                "pod has 70 containers and init containers, at most 64",
                id="many containers",
            ),
            pytest.param(manifest("90%"), "cannot be counted in quotas", id="a share of nothing"),
            pytest.param(manifest(None), "cannot be counted in quotas", id="nothing"),
            pytest.param(
                manifest("8Gi", annotations={f"team/{i}": "" for i in range(256)}),
                "pod has 257 annotations, at most 256",
                id="many annotations",
            ),
            pytest.param(
                manifest("8Gi", container(gpus=-1)), "a count is from 0", id="a negative count"
            ),
        ],
    )
    @pytest.mark.parametrize("observes", [False, True], ids=["enforce", "observe"])
    @pytest.mark.parametrize("placed", [{}, {"nodeName": "a"}, {"schedulerName": "other"}])
    def test_is_rejected_in_every_mode(
        self, obj: dict[str, Any], reported: str, observes: bool, placed: dict[str, str]
    ) -> None:
        sent = obj | {"spec": obj["spec"] | placed}
        response = decided(sent, around(node(devices=None), counts=True, observes=observes))
        assert response["allowed"] is False
        assert reported in response["status"]["message"]
        assert "patch" not in response

    def test_is_admitted_in_mode_observe_without_quotas(self) -> None:
        assert decided(manifest("8GB"), around(observes=True))["allowed"] is True
        assert decided(manifest("8GB"), around())["allowed"] is False

    def test_pods_without_a_gpu_are_not_rejected(self) -> None:
        many = manifest("8GB", *(container(f"c{i}", gpus=0) for i in range(70)))
        assert decided(many, around(counts=True))["allowed"] is True


def decided(obj: dict[str, Any], where: AdmissionContext) -> dict[str, Any]:
    """The response of the mutating webhook."""
    asked = read(json.dumps(review(obj)).encode())
    response: dict[str, Any] = json.loads(answer_mutate(asked, lambda _: where))["response"]
    return response
