"""Tests the request of a pod, from its containers, annotations and namespace."""

import pytest

from headroom.contract.annotations import Bytes, ReplicaShare, ScoringPolicy, Share
from headroom.contract.kube import Container, Pod, ResourceRequirements
from headroom.contract.reasons import Reason
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import (
    Portion,
    Unreadable,
    VramRequest,
    asks_for_gpu,
    understand,
)
from tests.builders import GIB, GPU, container, pod, request

SHARED = "nvidia.com/gpu.shared"


def amounts(asked: VramRequest) -> list[tuple[str, object, str]]:
    return [(c.name, c.amount, c.source) for c in asked.containers]


def phases(asked: VramRequest) -> set[tuple[object, ...]]:
    (ask,) = asked.asks
    return {tuple(portion.amount for portion in phase) for phase in ask.phases}


def test_an_annotated_pod_requests_its_annotation() -> None:
    asked = request("8Gi")
    assert amounts(asked) == [("main", Bytes(8 * GIB), "annotation")]
    (ask,) = asked.asks
    assert (ask.resource, ask.count, ask.widest) == (GPU, 1, 1)
    assert ask.phases == ((Portion(Bytes(8 * GIB), 1),),)
    assert asked.decision_id == "uid-p.1"


def test_the_namespace_default_applies_to_unannotated_pods() -> None:
    assert amounts(request(None, "4Gi")) == [("main", Bytes(4 * GIB), "namespace")]
    assert amounts(request("8Gi", "4Gi")) == [("main", Bytes(8 * GIB), "annotation")]


@pytest.mark.parametrize(
    ("written_from", "source"),
    [
        ("namespace team-a", "namespace"),
        ("VRAMProfile llm, other programs", "recommendation"),
        ("default= of the request", "annotation"),
    ],
)
def test_an_amount_that_the_webhook_wrote_keeps_its_source(written_from: str, source: str) -> None:
    created = pod("8Gi", annotations={"headroom.gpu/vram-from": written_from})
    assert amounts(request(created)) == [("main", Bytes(8 * GIB), source)]


def test_an_invalid_default_does_not_affect_annotated_pods() -> None:
    assert amounts(request("8Gi", "lots")) == [("main", Bytes(8 * GIB), "annotation")]
    understood = understand(pod(None), "lots", Rules())
    assert isinstance(understood, Unreadable)
    assert understood.reason is Reason.BAD_DEFAULT_VRAM


def test_without_annotation_and_default_a_pod_requests_the_share_of_its_replica() -> None:
    assert amounts(request(None)) == [("main", ReplicaShare(), "replica")]


def test_containers_missing_from_the_annotation_request_the_share_of_a_replica() -> None:
    asked = request(pod("a=25%", container("a"), container("b")))
    assert amounts(asked) == [
        ("a", Share(250_000), "annotation"),
        ("b", ReplicaShare(), "replica"),
    ]


def test_app_containers_add_up() -> None:
    asked = request(pod("a=8Gi,b=2Gi", container("a"), container("b", gpus=2)))
    (ask,) = asked.asks
    assert (ask.count, ask.widest) == (3, 2)
    assert ask.phases == ((Portion(Bytes(8 * GIB), 1), Portion(Bytes(2 * GIB), 2)),)


def test_an_init_container_is_a_separate_phase() -> None:
    asked = request(pod("i=9Gi,a=8Gi", container("a"), init=[container("i", gpus=2)]))
    assert phases(asked) == {(Bytes(9 * GIB),), (Bytes(8 * GIB),)}
    assert asked.asks[0].count == 2


def test_a_native_sidecar_adds_to_all_later_containers() -> None:
    sidecar = container("s", restart_policy="Always")
    before, after = container("i"), container("j")
    asked = request(pod("i=5Gi,s=1Gi,j=6Gi,a=8Gi", container("a"), init=[before, sidecar, after]))
    one, five, six, eight = (Bytes(n * GIB) for n in (1, 5, 6, 8))
    assert phases(asked) == {(five,), (one, six), (one, eight)}
    assert asked.asks[0].count == 2


def test_each_resource_has_its_own_request() -> None:
    asked = request(pod("8Gi", container("a"), container("b", resource=SHARED)))
    assert [(ask.resource, ask.count) for ask in asked.asks] == [(GPU, 1), (SHARED, 1)]


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(pod("nonsense", container(gpus=0)), id="no GPU"),
        pytest.param(
            pod("nonsense", container(resource="example.com/gpu")), id="a GPU of another vendor"
        ),
        pytest.param(pod("nonsense", Container(name="main")), id="no resources"),
    ],
)
def test_a_pod_without_a_managed_gpu_is_always_valid(of: Pod) -> None:
    assert not asks_for_gpu(of, Rules())
    assert request(of).asks == ()


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        pytest.param(pod("lots"), Reason.BAD_VRAM, id="vram is not a quantity"),
        pytest.param(pod("other=8Gi"), Reason.BAD_VRAM, id="vram names no GPU container"),
        pytest.param(
            pod(annotations={"headroom.gpu/policy": "best"}), Reason.BAD_POLICY, id="policy"
        ),
        pytest.param(
            pod(annotations={"headroom.gpu/max-sm": "0%"}), Reason.BAD_MAX_SM, id="max-sm"
        ),
        pytest.param(
            pod(annotations={"headroom.gpu/processes": "0"}), Reason.BAD_PROCESSES, id="processes"
        ),
        pytest.param(pod("8Gi", container(gpus=-1)), Reason.BAD_POD, id="a negative count"),
        pytest.param(pod("8Gi", container(gpus=1 << 60)), Reason.BAD_POD, id="an absurd count"),
    ],
)
def test_an_invalid_pod_has_its_reason(of: Pod, reason: Reason) -> None:
    understood = understand(of, None, Rules())
    assert isinstance(understood, Unreadable)
    assert understood.reason is reason
    assert asks_for_gpu(of, Rules())


def test_unannotated_pods_are_rejected_if_configured() -> None:
    rules = Rules(reject_unannotated=True)
    understood = understand(pod(None), None, rules)
    assert isinstance(understood, Unreadable)
    assert understood.reason is Reason.UNANNOTATED
    assert isinstance(understand(pod(None), "4Gi", rules), VramRequest)
    assert isinstance(understand(pod("4Gi"), None, rules), VramRequest)
    half = understand(pod("a=4Gi", container("a"), container("b")), None, rules)
    assert isinstance(half, Unreadable)


def test_a_request_without_a_limit_counts() -> None:
    only_request = Container(name="main", resources=ResourceRequirements(requests={GPU: 2}))
    assert request(pod("8Gi", only_request)).asks[0].count == 2


def test_the_policy_of_the_pod_overrides_the_setting() -> None:
    rules = Rules(policy=ScoringPolicy.SPREAD)
    assert request("8Gi", None, rules).policy is ScoringPolicy.SPREAD
    own = pod(annotations={"headroom.gpu/policy": "pack"})
    assert request(own, None, rules).policy is ScoringPolicy.PACK
