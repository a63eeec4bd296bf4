"""Tests which pods the webhook changes, and how."""

from dataclasses import replace
from typing import Any

import pytest

from headroom.core.placement.policy import Rules
from headroom.core.placement.request import VramRequest, understand
from tests.admission.reviews import (
    GATE_IMAGE,
    STATIC,
    around,
    container,
    manifest,
    mutated,
    node,
    pod,
)


class TestScheduler:
    @pytest.mark.parametrize(
        ("named", "label", "wanted", "becomes"),
        [
            pytest.param("default-scheduler", None, "headroom", "headroom", id="no scheduler"),
            pytest.param(
                "kai-scheduler", None, "headroom", "kai-scheduler", id="another scheduler"
            ),
            pytest.param(
                "default-scheduler", "none", "headroom", "default-scheduler", id="opted out"
            ),
            pytest.param(
                "default-scheduler", "special", "headroom", "special", id="opted out by label"
            ),
            pytest.param(
                "default-scheduler",
                None,
                "default-scheduler",
                "default-scheduler",
                id="default scheduler opted in",
            ),
            pytest.param(
                "default-scheduler", "headroom", "default-scheduler", "headroom", id="opted in"
            ),
        ],
    )
    def test_the_scheduler_of_gpu_pods_is_set(
        self, named: str, label: str | None, wanted: str, becomes: str
    ) -> None:
        labels = {} if label is None else {"headroom.gpu/scheduler": label}
        stored, _ = mutated(manifest(schedulerName=named), around(labels=labels, scheduler=wanted))
        assert stored["spec"]["schedulerName"] == becomes

    def test_a_pod_with_another_scheduler_gets_a_warning(self) -> None:
        _, answer = mutated(manifest(schedulerName="kai-scheduler"), around())
        assert answer.warnings == (
            "spec.schedulerName 'kai-scheduler': this scheduler does not call Headroom, so the pod "
            "may get a GPU without enough memory; set schedulerName: headroom",
        )

    def test_an_invalid_pod_is_sent_to_the_webhook_that_rejects_it(self) -> None:
        stored, _ = mutated(manifest("8Gj"), around())
        assert stored["spec"]["schedulerName"] == "headroom"

    @pytest.mark.parametrize(
        "obj",
        [
            pytest.param(manifest(None, container(gpus=0)), id="no GPU"),
            pytest.param(manifest("8Gi", container(gpus=0)), id="no GPU, but annotated"),
        ],
    )
    def test_other_objects_stay_unchanged(self, obj: dict[str, Any]) -> None:
        everything = around(
            node(choice="gated"),
            annotations={"headroom.gpu/default-vram": "4Gi", "headroom.gpu/share": "limit"},
            gate_image=GATE_IMAGE,
            mirror=True,
        )
        stored, answer = mutated(obj, everything)
        assert stored == obj
        assert answer.warnings == ()

    def test_a_static_pod_from_a_kubelet_stays_unchanged(self) -> None:
        where = around(node(choice="gated"), gate_image=GATE_IMAGE)
        obj = manifest(None, nodeName="n1", annotations={**STATIC, "headroom.gpu/retry": "x"})
        assert mutated(obj, replace(where, kubelet_node="n1"))[0] == obj
        for other in ("", "n2"):
            stored = mutated(obj, replace(where, kubelet_node=other))[0]
            assert "headroom.gpu/retry" not in stored["metadata"]["annotations"]

    def test_a_pod_with_a_node_name_gets_no_scheduler_and_no_placement(self) -> None:
        everything = around(
            node(choice="gated"),
            annotations={"headroom.gpu/share": "env", "headroom.gpu/gated": "true"},
            gate_image=GATE_IMAGE,
        )
        for scheduler in ("default-scheduler", "headroom"):
            obj = manifest(nodeName="n", schedulerName=scheduler)
            assert mutated(obj, everything)[0] == obj


class TestDefault:
    def test_a_default_is_recorded_with_its_source(self) -> None:
        stored, _ = mutated(
            manifest(None), around(annotations={"headroom.gpu/default-vram": "4Gi"})
        )
        assert stored["metadata"]["annotations"] == {
            "headroom.gpu/vram": "4Gi",
            "headroom.gpu/vram-from": "namespace team-a",
        }
        request = understand(pod(stored), None, Rules())
        assert isinstance(request, VramRequest)
        assert [(ask.amount_text, ask.source) for ask in request.containers] == [
            ("4Gi", "namespace")
        ]

    @pytest.mark.parametrize(
        ("own", "default", "becomes"),
        [
            pytest.param("8Gi", "4Gi", "8Gi", id="the pod has its own"),
            pytest.param(None, "main=4Gi,other=2Gi", "main=4Gi", id="only existing containers"),
            pytest.param(None, "other=2Gi", None, id="no existing container"),
            pytest.param(None, "4Gj", None, id="unreadable"),
            pytest.param(None, "25%", "25%", id="a share"),
        ],
    )
    def test_a_default_is_written_if_it_applies(
        self, own: str | None, default: str, becomes: str | None
    ) -> None:
        where = around(annotations={"headroom.gpu/default-vram": default})
        stored, _ = mutated(manifest(own), where)
        held = stored["metadata"].get("annotations", {}).get("headroom.gpu/vram")
        assert held == becomes

    def test_annotations_that_only_extenders_write_are_removed(self) -> None:
        ours = {
            "headroom.gpu/placement": "{}",
            "headroom.gpu/devices.0": "GPU-a",
            "headroom.gpu/bytes.0": "1",
            "headroom.gpu/devices.~1": "x",  # No API server accepts such a name.
            "headroom.gpu/retry": "x",
        }
        stored, answer = mutated(manifest("8Gi", annotations=ours), around())
        assert stored["metadata"]["annotations"] == {"headroom.gpu/vram": "8Gi"}
        assert [w.split()[1] for w in answer.warnings] == sorted(ours)


class TestMirror:
    def test_memory_of_all_devices_is_written_in_mib(self) -> None:
        obj = manifest("8G", container(gpus=2), initContainers=[container("init")])
        stored, _ = mutated(obj, around(mirror=True))
        (main,) = stored["spec"]["containers"]
        # Each device counts 7629.4 MiB.
        mib = {"nvidia.com/gpu": "2", "headroom.gpu/vram": "15260"}
        assert main["resources"] == {"limits": mib, "requests": mib}
        (init,) = stored["spec"]["initContainers"]
        assert init["resources"]["limits"]["headroom.gpu/vram"] == "7630"
        before = understand(pod(obj), None, Rules())
        after = understand(pod(stored), None, Rules())
        assert isinstance(before, VramRequest)
        assert isinstance(after, VramRequest)
        assert before.asks == after.asks

    def test_an_unknown_amount_is_not_written(self) -> None:
        stored, answer = mutated(manifest("25%"), around(mirror=True))
        assert "headroom.gpu/vram" not in stored["spec"]["containers"][0]["resources"]["limits"]
        assert "container 'main' does not count as headroom.gpu/vram" in answer.warnings[0]

    @pytest.mark.parametrize(("vram", "expected"), [("8Gi", "8192"), ("25%", "1")])
    def test_a_value_written_by_the_author_is_replaced_if_the_amount_is_known(
        self, vram: str, expected: str
    ) -> None:
        own = container()
        for each in own["resources"].values():
            each["headroom.gpu/vram"] = "1"
        stored, answer = mutated(manifest(vram, own), around(mirror=True))
        (main,) = stored["spec"]["containers"]
        assert main["resources"]["requests"]["headroom.gpu/vram"] == expected
        assert main["resources"]["limits"]["headroom.gpu/vram"] == expected
        assert answer.warnings == ()
