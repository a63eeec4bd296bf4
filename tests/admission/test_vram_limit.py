"""Tests the limit of a pod, and the default limit and maximum limit of its namespace, at
admission.
"""

from typing import Any

import pytest

from headroom.core.placement.request import MemoryClass, VramRequest, understand
from tests.admission.reviews import around, container, manifest, mutated, node, pod
from tests.admission.test_validation import rejection, warnings

VRAM, LIMIT = "headroom.gpu/vram", "headroom.gpu/vram-limit"
DEFAULT, MAXIMUM = "headroom.gpu/default-vram-limit", "headroom.gpu/max-vram-limit"
TWO = (container("main"), container("cache"))


def limited(limit: str | None, vram: str | None = "8Gi", *containers: Any) -> dict[str, Any]:
    return manifest(vram, *containers, annotations={} if limit is None else {LIMIT: limit})


@pytest.mark.parametrize(
    ("vram", "limit", "memory_class"),
    [
        pytest.param("8Gi", None, MemoryClass.UNLIMITED, id="no limit"),
        pytest.param("8Gi", "none", MemoryClass.UNLIMITED, id="none"),
        pytest.param("8Gi", "20Gi", MemoryClass.BURSTABLE, id="amount"),
        pytest.param("8Gi", "8192Mi", MemoryClass.GUARANTEED, id="equal"),
        pytest.param("25%", "50%", MemoryClass.BURSTABLE, id="share"),
        pytest.param("8Gi", "50%", MemoryClass.BURSTABLE, id="amount and share"),
        pytest.param("8Gi", "main=8Gi", MemoryClass.GUARANTEED, id="by container"),
    ],
)
def test_a_valid_limit_is_admitted(vram: str, limit: str | None, memory_class: MemoryClass) -> None:
    obj = limited(limit, vram)
    assert rejection(obj) == ""
    request = understand(pod(obj), None, around().rules)
    assert isinstance(request, VramRequest)
    assert request.memory_class is memory_class
    plain = understand(pod(limited(None, vram)), None, around().rules)
    assert isinstance(plain, VramRequest)
    assert request.kind == plain.kind  # The limit changes no placement.


@pytest.mark.parametrize(
    ("vram", "limit", "message"),
    [
        pytest.param(
            "8Gi",
            "20GB",
            "annotation headroom.gpu/vram-limit: '20GB' is not valid: 'GB' is not a unit; units are"
            " like Mi, Gi, M and G. Example: headroom.gpu/vram-limit: 20Gi",
            id="another form",
        ),
        pytest.param(
            "8Gi",
            "auto",
            "annotation headroom.gpu/vram-limit: 'auto' is not an amount. Example: "
            "headroom.gpu/vram-limit: 20Gi",
            id="auto",
        ),
        pytest.param(
            "8Gi",
            "20",
            "annotation headroom.gpu/vram-limit: '20' is only 20 bytes; the unit is "
            "probably missing. Example: headroom.gpu/vram-limit: 8Gi",
            id="without a unit",
        ),
        pytest.param(
            "8Gi",
            "4Gi",
            "annotation headroom.gpu/vram-limit: '4Gi' is less than the request of container main, "
            "8Gi. Example: headroom.gpu/vram-limit: 8Gi",
            id="below the request",
        ),
        pytest.param(
            "50%",
            "25%",
            "annotation headroom.gpu/vram-limit: '25%' is less than the request of container main, "
            "50%. Example: headroom.gpu/vram-limit: 50%",
            id="share below the request",
        ),
        pytest.param(
            None,
            "20Gi",
            "annotation headroom.gpu/vram-limit: '20Gi' needs a request for container main: add "
            "headroom.gpu/vram, for example headroom.gpu/vram: 8Gi. Example: "
            "headroom.gpu/vram-limit: 20Gi",
            id="without a request",
        ),
        pytest.param(
            "8Gi",
            "mian=20Gi",
            "annotation headroom.gpu/vram-limit: 'mian=20Gi' names container 'mian', but the GPU "
            "containers are: main. Example: headroom.gpu/vram-limit: main=8Gi",
            id="unknown container",
        ),
    ],
)
def test_an_invalid_limit_is_rejected(vram: str | None, limit: str | None, message: str) -> None:
    assert rejection(limited(limit, vram)).startswith(f"Headroom: {message}")


def test_a_limit_names_all_gpu_containers() -> None:
    obj = limited("main=20Gi", "main=8Gi,cache=2Gi", *TWO)
    assert rejection(obj) == (
        "Headroom: annotation headroom.gpu/vram-limit: 'main=20Gi' names no limit for container "
        "cache. Example: headroom.gpu/vram-limit: main=20Gi,cache=2Gi"
    )
    assert rejection(limited("main=20Gi,cache=4Gi", "main=8Gi,cache=2Gi", *TWO)) == ""


def test_a_limit_above_the_largest_gpu_is_warned_about() -> None:
    assert warnings(limited("500Gi"), around(node())) == [
        "Headroom: annotation headroom.gpu/vram-limit: container main may use 500.0 GiB, and the "
        "largest GPU that it may use has 24.0 GiB, so the limit has no effect"
    ]
    assert warnings(limited("20Gi"), around(node())) == []


def test_a_limit_without_a_gpu_is_warned_about() -> None:
    obj = limited("20Gi", None, container(gpus=0))
    assert warnings(obj) == [
        "Headroom: annotation headroom.gpu/vram-limit has no effect: no container requests a GPU"
    ]


@pytest.mark.parametrize(
    ("default", "maximum", "limit", "vram", "written"),
    [
        pytest.param("20Gi", None, None, "8Gi", "20Gi", id="default"),
        pytest.param("20Gi", None, "10Gi", "8Gi", "10Gi", id="own limit"),
        pytest.param("20Gi", None, "none", "8Gi", "none", id="own none"),
        pytest.param("4Gi", None, None, "8Gi", "8Gi", id="a default below the request"),
        pytest.param("50%", None, None, "8Gi", "50%", id="a default of another form"),
        pytest.param("20Gi", None, None, None, None, id="no request"),
        pytest.param(None, "20Gi", None, "8Gi", "20Gi", id="maximum"),
        pytest.param("10Gi", "20Gi", None, "8Gi", "10Gi", id="default and maximum"),
        pytest.param("none", "20Gi", None, "8Gi", "20Gi", id="default none and maximum"),
        pytest.param("none", None, None, "8Gi", None, id="default none"),
        pytest.param("main=20Gi", None, None, "8Gi", "20Gi", id="default by container"),
        pytest.param("other=20Gi", None, None, "8Gi", None, id="default of another container"),
    ],
)
def test_the_limit_of_the_namespace_is_written_at_creation(
    default: str | None,
    maximum: str | None,
    limit: str | None,
    vram: str | None,
    written: str | None,
) -> None:
    texts = {DEFAULT: default, MAXIMUM: maximum}
    where = around(annotations={key: text for key, text in texts.items() if text is not None})
    stored, answer = mutated(limited(limit, vram), where)
    assert stored["metadata"].get("annotations", {}).get(LIMIT) == written
    assert answer.warnings == ()
    if vram is not None:
        assert rejection(stored, where) == ""
    assert mutated(stored, where)[0] == stored


def test_a_default_below_one_of_two_requests_is_written_by_container() -> None:
    where = around(annotations={DEFAULT: "4Gi"})
    stored, _ = mutated(limited(None, "main=8Gi,cache=2Gi", *TWO), where)
    assert stored["metadata"]["annotations"][LIMIT] == "main=8Gi,cache=4Gi"
    assert rejection(stored, where) == ""


@pytest.mark.parametrize(
    ("vram", "limit", "message"),
    [
        pytest.param(
            "8Gi",
            "30Gi",
            "annotation headroom.gpu/vram-limit: '30Gi' is above the maximum of namespace team-a, "
            "20Gi (headroom.gpu/max-vram-limit). Example: headroom.gpu/vram-limit: 20Gi",
            id="limit",
        ),
        pytest.param(
            "30Gi",
            "30Gi",
            "annotation headroom.gpu/vram: '30Gi' is above the maximum of namespace team-a, 20Gi "
            "(headroom.gpu/max-vram-limit). Example: headroom.gpu/vram: 20Gi",
            id="request",
        ),
        pytest.param(
            "8Gi",
            "none",
            "annotation headroom.gpu/vram-limit: 'none' is not allowed: the maximum of namespace "
            "team-a, 20Gi (headroom.gpu/max-vram-limit), applies to every pod. Example: "
            "headroom.gpu/vram-limit: 20Gi",
            id="none",
        ),
        pytest.param(
            "8Gi",
            "100%",
            "annotation headroom.gpu/vram-limit: '100%' cannot be compared with the maximum of "
            "namespace team-a, 20Gi (headroom.gpu/max-vram-limit): write an amount if it is an "
            "amount, and a share if it is a share. Example: headroom.gpu/vram-limit: 20Gi",
            id="a share",
        ),
        pytest.param(
            None,
            None,
            "container main requests no amount of GPU memory, and pods of namespace team-a need "
            "one, because it sets headroom.gpu/max-vram-limit. Example: headroom.gpu/vram: 20Gi",
            id="no request",
        ),
    ],
)
def test_the_maximum_of_the_namespace(vram: str | None, limit: str | None, message: str) -> None:
    where = around(annotations={MAXIMUM: "20Gi"})
    stored, _ = mutated(limited(limit, vram), where)
    assert rejection(stored, where) == f"Headroom: {message}"


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        (DEFAULT, "20GB", "is not valid: 'GB' is not a unit"),
        (DEFAULT, "20", "is only 20 bytes; the unit is probably missing"),
        (MAXIMUM, "none", "is not one amount or share. Example: headroom.gpu/max-vram-limit: 20Gi"),
        (MAXIMUM, "main=20Gi", "is not one amount or share"),
    ],
)
def test_invalid_limits_of_a_namespace_are_rejected(key: str, text: str, message: str) -> None:
    namespace = {"metadata": {"annotations": {key: text}}}
    assert f"annotation {key}: '{text}' {message}" in rejection(namespace, kind="Namespace")
    if "bytes" not in message:  # written before the webhook was installed
        stored, _ = mutated(limited(None), where := around(annotations={key: text}))
        assert rejection(stored, where).startswith(f"Headroom: namespace team-a: annotation {key}")


def test_a_template_gets_the_limit_of_its_namespace_later() -> None:
    where = around(annotations={MAXIMUM: "20Gi"})
    workload = {"metadata": {}, "spec": {"template": limited(None)}}
    assert warnings(workload, where, kind="Deployment") == []
    workload = {"metadata": {}, "spec": {"template": limited("30Gi")}}
    assert "is above the maximum" in warnings(workload, where, kind="Deployment")[0]


def test_a_namespace_without_a_limit_changes_nothing() -> None:
    assert (
        mutated(limited(None), around())[1].operations
        == mutated(manifest(), around())[1].operations
    )
    stored, _ = mutated(manifest(), around())
    assert LIMIT not in stored["metadata"]["annotations"]
