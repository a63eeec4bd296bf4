"""Tests that authors read at creation that their pod is too large, chooses its GPUs itself, or has
no amount."""

from typing import Any

import pytest

from tests.admission.reviews import around, container, manifest, node
from tests.admission.test_validation import warnings
from tests.builders import GIB, device, shared

VRAM = "headroom.gpu/vram"
L4 = node("l4", devices=[shared("GPU-1", free=8)], labels={"gpu": "l4"})
A100 = node("a100", devices=[device("GPU-2", memory_bytes=80 * GIB)], labels={"gpu": "a100"})


def pod(vram: str | None, *containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return manifest(vram, *containers, **spec)


def too_large(needs: str, largest: str, waits: str = "the pod waits") -> list[str]:
    return [
        f"Headroom: annotation {VRAM}: container main needs {needs}, and the largest GPU that it "
        f"may use has {largest}, so {waits}"
    ]


def test_an_amount_that_no_gpu_has_is_warned_about_at_creation() -> None:
    assert warnings(pod("500Gi"), around(L4)) == too_large("500.0 GiB", "24.0 GiB")
    assert warnings(pod("500Gi"), around(L4, A100)) == too_large("500.0 GiB", "80.0 GiB")
    assert warnings(pod("80Gi"), around(L4, A100)) == []
    assert warnings(pod("24Gi"), around(L4)) == []


def test_only_gpus_that_the_pod_may_use_count() -> None:
    on_l4 = pod("40Gi", nodeSelector={"gpu": "l4"})
    assert warnings(on_l4, around(L4, A100)) == too_large("40.0 GiB", "24.0 GiB")
    assert warnings(pod("40Gi"), around(L4, A100)) == []


def test_in_mode_observe_the_pod_would_wait() -> None:
    found = warnings(pod("500Gi"), around(L4, observes=True))
    assert found == too_large("500.0 GiB", "24.0 GiB", "in mode enforce, the pod would wait")


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param((), id="no nodes"),
        pytest.param((node("n", devices=None),), id="no report"),
        pytest.param((node("n", devices=[shared("a", memory_bytes=-1)]),), id="unknown size"),
    ],
)
def test_a_size_that_is_not_known_causes_no_warning(nodes: Any) -> None:
    assert warnings(pod("500Gi"), around(*nodes)) == []


def test_a_template_of_a_deployment_is_warned_about() -> None:
    deployment = {"metadata": {"name": "d"}, "spec": {"template": pod("500Gi")}}
    found = warnings(deployment, around(L4), kind="Deployment")
    assert found == too_large("500.0 GiB", "24.0 GiB")


def test_a_pod_that_chooses_its_gpus_itself_is_warned_about() -> None:
    chooses = container(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}])
    assert warnings(pod("4Gi", chooses), around(L4)) == [
        "Headroom: env NVIDIA_VISIBLE_DEVICES of a container selects GPUs itself, so the pod waits "
        "on nodes that honor it; remove the variable, also from envFrom"
    ]
    hides = container(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "none"}])
    assert warnings(pod("4Gi", hides), around(L4)) == []


def test_a_forgotten_amount_is_mentioned_where_gpus_are_shared() -> None:
    assert warnings(pod(None), around(A100, L4)) == [
        f"Headroom: annotation {VRAM} is missing: container main reserves the share of one replica "
        f"of its GPU, for example 3.0 GiB. Example: {VRAM}: 8Gi"
    ]
    assert warnings(pod(None), around(A100)) == []
    default = {"headroom.gpu/default-vram": "4Gi"}
    assert warnings(pod(None), around(L4, annotations=default)) == []
    assert warnings(pod(None, container(gpus=0)), around(L4)) == []


def test_a_namespace_that_headroom_leaves_alone_gets_no_warning() -> None:
    labels = {"headroom.gpu/scheduler": "none"}
    assert warnings(pod("500Gi"), around(L4, labels=labels)) == []
