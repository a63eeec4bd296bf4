"""Tests the memory resource for ResourceQuotas and Kueue in pods and in the templates of queued
Jobs.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from headroom.contract.gpunode import Device, GPUNodeStatus
from headroom.contract.quantity import parse_bytes
from headroom.contract.watched import GPUNodeSeen, NodeSeen
from headroom.core.placement.fit import fit
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import VramRequest
from headroom.runtime.settings.settings import Settings
from headroom.webhook.context import AdmissionContext
from headroom.webhook.review import answer_mutate, read
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
from tests.builders import DISTRIBUTED, gpunode, kube_node, shared
from tests.builders import pod as asking
from tests.console.asking import WALL_S
from tests.lying.lies import PLAUSIBLE, lies
from tests.recording import RecordingState

COUNTED = "headroom.gpu/vram-bytes"
IN_A_QUEUE = {"kueue.x-k8s.io/queue-name": "team"}


def counted(obj: dict[str, Any], *nodes: Any, rules: Rules | None = None) -> list[str | None]:
    """Return the counted memory of each container after the webhook was called twice."""
    where = replace(around(*nodes, counts=True), rules=rules or Rules())
    stored, _ = mutated(mutated(obj, where)[0], where)
    found = []
    for each in all_containers(stored):
        resources = each["resources"]
        assert resources["limits"].get(COUNTED) == resources["requests"].get(COUNTED)
        found.append(resources["limits"].get(COUNTED))
    return found


class TestCounted:
    def test_memory_of_all_devices_is_counted_in_bytes(self) -> None:
        obj = manifest("8Gi", container(gpus=2), initContainers=[container("init")])
        assert counted(obj) == ["8Gi", "16Gi"]
        assert counted(manifest("8G")) == ["7812500Ki"]
        assert counted(manifest("8Gi", container(gpus=0))) == [None]
        assert mutated(manifest("8Gi"), around())[0]["spec"]["containers"] == [container()]

    @pytest.mark.parametrize("vram", ["1", "1Mi", "512Mi", "1%"])
    def test_each_device_counts_for_at_least_512_mib(self, vram: str) -> None:
        small = node("a", devices=[shared(memory_bytes=8 << 30)])
        assert counted(manifest(vram, container(gpus=2)), small) == ["1Gi"]

    def test_an_amount_that_depends_on_the_device_counts_as_on_the_largest_device(self) -> None:
        small = node("a", devices=[shared(memory_bytes=8 << 30)])
        large = node("b", devices=[shared(memory_bytes=80 << 30, free=8)])
        assert counted(manifest("25%"), small, large) == ["20Gi"]
        # The larger replica counts twice: 1/8 of 80 GiB instead of 1/4 of 8 GiB.
        assert counted(manifest(None, container(gpus=2)), small, large) == ["20Gi"]
        assert counted(manifest("25%"), node(devices=None)) == [None]

    @pytest.mark.parametrize("lists", [["limits"], ["requests"], ["limits", "requests"]])
    def test_a_count_written_by_the_author_is_replaced(self, lists: list[str]) -> None:
        own = container()
        for each in lists:
            own["resources"][each][COUNTED] = "1"
        assert counted(manifest("8Gi", own)) == ["8Gi"]


def job(obj: Mapping[str, Any], labels: Mapping[str, str] = IN_A_QUEUE) -> dict[str, Any]:
    """Return a Job with a template of this pod."""
    metadata = {"name": "train", "labels": dict(labels)}
    template = {"metadata": obj["metadata"], "spec": obj["spec"]}
    return {"apiVersion": "batch/v1", "metadata": metadata, "spec": {"template": template}}


def queued(obj: dict[str, Any], context: AdmissionContext) -> dict[str, Any]:
    """Return the Job as the API server stores it."""
    body = json.dumps(review(obj, kind="Job")).encode()
    answer = json.loads(answer_mutate(read(body), lambda _: context))
    return applied(obj, patch_of(answer["response"]))


class TestQueuedJobs:
    def test_the_template_of_a_queued_job_counts_as_its_pods_will(self) -> None:
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

    def test_the_template_counts_with_the_default_of_the_namespace(self) -> None:
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
    def test_other_jobs_stay_unchanged(
        self, obj: dict[str, Any], context: AdmissionContext
    ) -> None:
        assert queued(obj, context) == obj


class TestUncounted:
    """Tests amounts that cannot be counted. The mutating webhook rejects pods with such amounts,
    because it fails closed, unlike the validating webhook.
    """

    @pytest.mark.parametrize(
        ("obj", "reported"),
        [
            pytest.param(manifest("20 GiB please"), "'20 GiB please' is not valid", id="an amount"),
            pytest.param(
                manifest("8Gi", *(container(f"c{i}") for i in range(70))),
                "pod has 70 containers and init containers, but at most 64",
                id="many containers",
            ),
            pytest.param(manifest("90%"), "cannot be counted in quotas", id="a share of nothing"),
            pytest.param(manifest(None), "cannot be counted in quotas", id="nothing"),
            pytest.param(
                manifest("8Gi", annotations={f"team/{i}": "" for i in range(256)}),
                "pod has 257 annotations, but at most 256",
                id="many annotations",
            ),
            pytest.param(
                manifest("8Gi", container(gpus=-1)), "a count is from 0", id="a negative count"
            ),
        ],
    )
    @pytest.mark.parametrize("observes", [False, True], ids=["enforce", "observe"])
    @pytest.mark.parametrize("placed", [{}, {"nodeName": "a"}, {"schedulerName": "other"}])
    def test_an_uncountable_amount_is_rejected_in_every_mode(
        self, obj: dict[str, Any], reported: str, observes: bool, placed: dict[str, str]
    ) -> None:
        sent = obj | {"spec": obj["spec"] | placed}
        response = decided(sent, around(node(devices=None), counts=True, observes=observes))
        assert response["allowed"] is False
        assert reported in response["status"]["message"]
        assert "patch" not in response

    def test_an_uncountable_amount_is_admitted_in_mode_observe_without_quotas(self) -> None:
        assert decided(manifest("8GB"), around(observes=True))["allowed"] is True
        assert decided(manifest("8GB"), around())["allowed"] is False

    def test_pods_without_a_gpu_are_not_rejected(self) -> None:
        many = manifest("8GB", *(container(f"c{i}", gpus=0) for i in range(70)))
        assert decided(many, around(counts=True))["allowed"] is True


def decided(obj: dict[str, Any], where: AdmissionContext) -> dict[str, Any]:
    """Return the response of the mutating webhook."""
    asked = read(json.dumps(review(obj)).encode())
    response: dict[str, Any] = json.loads(answer_mutate(asked, lambda _: where))["response"]
    return response


class TestLargestDevices:
    """With the setting ``largest_devices``, the count does not depend on a report."""

    RULES = Settings(largest_devices=("nvidia.com/gpu=80Gi", "nvidia.com/gpu.shared=24Gi/4")).rules

    @pytest.mark.parametrize(
        ("vram", "gpus", "expected"),
        [("25%", 1, "20Gi"), ("25%", 2, "40Gi"), (None, 1, "80Gi"), ("8Gi", 1, "8Gi")],
    )
    def test_no_report_changes_the_counted_memory(
        self, vram: str | None, gpus: int, expected: str
    ) -> None:
        obj = manifest(vram, container(gpus=gpus))
        honest = node("a", devices=[shared(memory_bytes=8 << 30)])

        @given(lies())
        def unchanged(lie: GPUNodeStatus) -> None:
            lying = replace(node("b"), status=lie)
            for nodes in ((), (honest,), (honest, lying)):
                assert counted(obj, *nodes, rules=self.RULES) == [expected]

        unchanged()

    def test_a_shared_device_counts_by_replica(self) -> None:
        obj = manifest(None, container(resource="nvidia.com/gpu.shared"))
        assert counted(obj, rules=self.RULES) == ["6Gi"]

    def test_a_device_with_implausible_memory_does_not_count(self) -> None:
        twice = [shared("GPU-x", memory_bytes=8 << 30)] * 2
        honest = node("a", devices=[shared(memory_bytes=8 << 30)])
        assert counted(manifest("25%"), honest, node("b", devices=twice)) == ["2Gi"]

    @pytest.mark.parametrize("vram", ["25%", "100%", None])
    def test_no_pod_reserves_more_than_it_counts(self, vram: str | None) -> None:
        rules = Settings(largest_devices=("nvidia.com/gpu=24Gi/4",)).rules
        counted_bytes = parse_bytes(counted(manifest(vram), rules=rules)[0] or "")

        @given(PLAUSIBLE)
        def reserves(device: Device) -> None:
            state = RecordingState(rules, 90.0, WALL_S)
            state.apply(
                [
                    NodeSeen(kube_node("n")),
                    GPUNodeSeen(gpunode(device, name="n", plugin=DISTRIBUTED), 0.0),
                ]
            )
            request = state.cluster.understand(asking(vram))
            assert isinstance(request, VramRequest)
            verdicts = fit(
                request, state.cluster.snapshot(), state.cluster.snapshot().rows(["n"]), 0.0
            )
            placed.add(bool(verdicts.fits.any()))
            if verdicts.fits.any():
                (verdict,) = verdicts.asks
                needs = verdict.all_need_bytes[verdict.candidates]
                assert needs.max() <= counted_bytes

        placed: set[bool] = set()
        reserves()
        assert placed == {True, False}
