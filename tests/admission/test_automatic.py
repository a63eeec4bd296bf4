"""Tests which amounts the webhook writes for the request ``auto``, and which requests it
rejects.
"""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from headroom.contract.annotations import parse_auto, parse_vram
from headroom.contract.errors import BadAnnotation
from headroom.contract.gpunode import GPUNode, GPUNodeSpec
from headroom.contract.kube import Node, ObjectMeta
from headroom.contract.quantity import parse_bytes
from headroom.contract.reasons import Reason
from headroom.contract.vramprofile import ProfileController, VRAMProfile
from headroom.contract.watched import GPUNodeSeen, NodeSeen
from headroom.core.placement.request import Unreadable, understand
from headroom.core.recommend.lives import Ending, Life
from headroom.core.recommend.pod_programs import programs_of
from headroom.core.recommend.profile import Profile
from headroom.core.recommend.profile_status import status_of
from headroom.webhook.context import AdmissionContext, GpuNode
from headroom.webhook.review import answer_mutate, answer_validate, read
from headroom.webhook.validation import validate_pod
from tests.admission.reviews import (
    applied,
    around,
    container,
    manifest,
    mutated,
    patch_of,
    pod,
    review,
)
from tests.builders import GIB, NOW_S, reason_for, shared, status
from tests.console.asking import WALL_S
from tests.console.test_recommendations import ENDED_S, profile
from tests.state.states import state_of

REPLICA_SET = {
    "apiVersion": "apps/v1",
    "kind": "ReplicaSet",
    "name": "llm-5d4f",
    "uid": "rs",
    "controller": True,
}


def owned(vram: str | None, *containers: Any, **annotations: str) -> dict[str, Any]:
    made = manifest(vram, *containers, annotations=annotations)
    made["metadata"] |= {
        "ownerReferences": [REPLICA_SET],
        "labels": {"pod-template-hash": "5d4f"},
    }
    return made


def known(
    obj: dict[str, Any], found: VRAMProfile | None = None, program: str = "p1", **around_: Any
) -> AdmissionContext:
    """Return a context with a profile of the Deployment llm. Its containers run ``program``."""
    programs, _ = programs_of(json.dumps(obj).encode())
    programs = {name: replace(each, fingerprint=program) for name, each in programs.items()}

    def of(namespace: str, controller: ProfileController) -> VRAMProfile | None:
        wanted = ("team-a", ProfileController(kind="ReplicaSet", name="llm"))
        return found if (namespace, controller) == wanted else None

    return replace(around(**around_), programs=programs, profile=of, now_s=WALL_S)


def annotations(stored: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = stored["metadata"]["annotations"]
    return {key.removeprefix("headroom.gpu/"): text for key, text in found.items()}


#: The recommendation from ``profile()``, which has five runs that use 8 GiB.
RECOMMENDED = "9600Mi"


def test_the_recommendation_replaces_auto_and_the_original_is_kept() -> None:
    obj = owned("auto")
    stored, answer = mutated(obj, known(obj, profile()))
    assert annotations(stored) == {
        "vram": RECOMMENDED,
        "vram-requested": "auto",
        "vram-from": "VRAMProfile deployment-llm",
    }
    assert answer.warnings == ()
    assert validate_pod(pod(stored), None, known(obj, profile())).rejection == ""
    again, _ = mutated(stored, known(stored, profile(lives=50)))
    assert annotations(again) == annotations(stored)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("auto,min=12Gi", "12Gi"),
        ("auto,max=4Gi", "4Gi"),
        (" auto , min=1Gi , max=20Gi , default=2Gi", RECOMMENDED),
    ],
)
def test_limits_of_the_author_bound_the_recommendation(text: str, written: str) -> None:
    obj = owned(text)
    stored, _ = mutated(obj, known(obj, profile()))
    assert annotations(stored)["vram"] == written
    assert annotations(stored)["vram-requested"] == text


@pytest.mark.parametrize("limit", ["4Gi", "main=4Gi"])
def test_the_recommendation_is_at_most_the_limit(limit: str) -> None:
    obj = owned("auto", **{"headroom.gpu/vram-limit": limit})
    stored, _ = mutated(obj, known(obj, profile()))
    assert annotations(stored)["vram"] == "4Gi"
    assert validate_pod(pod(stored), None, known(obj, profile())).rejection == ""


@pytest.mark.parametrize(
    ("text", "default", "written", "source"),
    [
        ("auto,default=6Gi", "4Gi", "6Gi", "default= of the request"),
        ("auto,default=25%", None, "25%", "default= of the request"),
        ("auto,min=1Gi", "4Gi", "4Gi", "namespace team-a"),
        ("auto", "main=3Gi,other=1Gi", "main=3Gi", "namespace team-a"),
    ],
)
@pytest.mark.parametrize("found", [None, profile(lives=2)], ids=["no profile", "few runs"])
def test_a_pod_without_a_recommendation_gets_a_default(
    found: VRAMProfile | None, text: str, default: str | None, written: str, source: str
) -> None:
    obj = owned(text)
    of_namespace = {} if default is None else {"headroom.gpu/default-vram": default}
    stored, result = mutated(obj, known(obj, found, annotations=of_namespace))
    done = result.warnings
    above = "of 2 lives, some used up to 8.1 GiB on NVIDIA L4"
    if found is not None and written != "25%":
        source += f"; {above}"
        assert f"annotation headroom.gpu/vram is auto, which became {written}: {above}" in done
    else:
        assert not any("some used" in warning for warning in done)
    assert annotations(stored) == {"vram": written, "vram-requested": text, "vram-from": source}


def test_a_pod_without_any_amount_is_rejected() -> None:
    obj = owned("auto")
    context = known(obj, profile(lives=2))
    stored, _ = mutated(obj, context)
    assert annotations(stored) == {"vram": "auto"}
    assert validate_pod(pod(stored), None, context).rejection == (
        "annotation headroom.gpu/vram: 'auto' has no recommendation yet: too few lives of this "
        "workload are recorded, or their use still grew, and neither default= nor a default of "
        "namespace team-a is set. Example: headroom.gpu/vram: auto,default=8Gi"
    )


def test_a_new_program_gets_the_default_or_else_the_need_of_its_owners_other_programs() -> None:
    obj = owned("auto,default=6Gi")
    stored, _ = mutated(obj, known(obj, profile(), program="p2"))
    assert annotations(stored)["vram"] == "6Gi"
    obj = owned("auto")
    stored, answer = mutated(obj, known(obj, profile(), program="p2"))
    assert annotations(stored)["vram"] == RECOMMENDED
    assert annotations(stored)["vram-from"] == "VRAMProfile deployment-llm, other programs"
    assert "no lives of this program" in answer.warnings[0]


def test_every_gpu_container_needs_a_recommendation() -> None:
    two = container(), container("other")
    obj = owned("auto", *two)
    stored, _ = mutated(obj, known(obj, profile()))
    assert annotations(stored) == {"vram": "auto"}
    obj = owned("auto", container(), container("sidecar", gpus=0))
    stored, _ = mutated(obj, known(obj, profile()))
    assert annotations(stored)["vram"] == RECOMMENDED


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("auto,least=2Gi", "has an option 'least=2Gi' that is not min=, max= or default="),
        ("auto,min=2Gi,min=3Gi", "has option min= twice"),
        ("auto,min=25%", "has a min= or max= that is not a quantity"),
        ("auto,min=9Gi,max=8Gi", "has min= above max="),
        ("auto,default=8Gj", "is not valid: 'Gj' is not a unit"),
        ("auto,", "has an option '' that is not min=, max= or default="),
    ],
)
def test_invalid_options_are_rejected(text: str, why: str) -> None:
    with pytest.raises(BadAnnotation, match=why.replace("'", ".")):
        parse_auto(text)
    obj = owned(text)
    context = known(obj, profile())
    stored, _ = mutated(obj, context)
    assert annotations(stored) == {"vram": text}
    assert why in validate_pod(pod(stored), None, context).rejection


def test_auto_that_reaches_filter_is_rejected() -> None:
    found = understand(pod(owned("auto,default=8Gi")), "4Gi", around().rules)
    assert isinstance(found, Unreadable)
    assert found.message == (
        "annotation headroom.gpu/vram: 'auto,default=8Gi' was not replaced, because Headroom's "
        "webhook does this only when a pod is created. Example: headroom.gpu/vram: 8Gi"
    )
    with pytest.raises(BadAnnotation, match="was not replaced"):
        parse_vram("auto", "headroom.gpu/default-vram")


def test_a_pod_and_its_deployment_are_reviewed_consistently() -> None:
    obj = owned("auto")
    programs, _ = programs_of(json.dumps(obj).encode())
    context = known(obj, profile(program=programs["main"].fingerprint))
    # The webhook reads the programs from the reviewed pod itself.
    bare = replace(context, programs={})
    body = json.dumps(review(obj)).encode()
    response = json.loads(answer_mutate(read(body), lambda _: bare))["response"]
    stored = applied(obj, patch_of(response))
    assert annotations(stored)["vram"] == RECOMMENDED
    assert annotations(stored)["vram-from"] == "VRAMProfile deployment-llm"
    template = {"metadata": obj["metadata"], "spec": obj["spec"]}
    deployment = {"metadata": {"name": "llm"}, "spec": {"template": template}}
    body = json.dumps(review(deployment, kind="Deployment")).encode()
    response = json.loads(answer_validate(read(body), lambda _: bare))["response"]
    assert response["allowed"]
    assert "warnings" not in response


def test_memory_of_a_recommendation_is_rounded_up() -> None:
    assert int(RECOMMENDED.removesuffix("Mi")) % 64 == 0
    assert int(RECOMMENDED.removesuffix("Mi")) << 20 >= 8 * GIB


def l4(name: str = "gpu", model: str = "NVIDIA L4", gib: int = 24, **other: Any) -> GpuNode:
    """Return a node with one shared GPU."""
    sharing, node_annotations = other.pop("sharing", "time-slicing"), other.pop("annotations", {})
    device = shared("A", model=model, memory_bytes=gib * GIB, sharing=sharing)
    metadata = ObjectMeta(name=name, annotations=node_annotations, labels=other.pop("labels", {}))
    return GpuNode(Node(metadata=metadata), status(device, **other))


def of_lives(**peaks_gib: float) -> VRAMProfile:
    """Return a profile that has, for each GPU model, six runs with this peak."""
    kept, base = Profile(), profile()
    for model, gib in peaks_gib.items():
        for _ in range(6):
            life = Life(int(gib * GIB), ENDED_S - 3600, ENDED_S, Ending.COMPLETED, None)
            kept.container("main", model).record("p1", life)
    owner = base.status.owner
    made = status_of(kept, owner, {("main", model): "vLLM" for model in peaks_gib}, ENDED_S)
    made = msgspec.structs.replace(made, controllers=base.status.controllers)
    return msgspec.structs.replace(base, status=made)


def written(found: VRAMProfile, *nodes: GpuNode, text: str = "auto", **spec: Any) -> str:
    obj = owned(text)
    obj["spec"] |= spec
    stored, _ = mutated(obj, replace(known(obj, found), nodes=nodes))
    return annotations(stored)["vram"]


def test_no_more_is_requested_than_a_device_has_without_the_reserve() -> None:
    reserving = l4(annotations={"headroom.gpu/reserve": "512Mi"})
    amount = written(of_lives(**{"NVIDIA L4": 22.9}), reserving)
    assert amount == "24064Mi"  # 23.5 GiB
    held = GPUNode(
        metadata=ObjectMeta(name="gpu"),
        spec=GPUNodeSpec(initialised=True),
        status=reserving.status,
    )
    state = state_of(NodeSeen(reserving.node), GPUNodeSeen(held, NOW_S))
    assert reason_for(amount, state.cluster.snapshot().nodes[0]) is None
    assert reason_for("24065Mi", state.cluster.snapshot().nodes[0]) is Reason.MEMORY_ON_ANY


def test_only_candidate_devices_of_the_pod_count() -> None:
    found = of_lives(A100=70.0, L4=8.0)
    small = l4("small", "L4", labels={"size": "small"})
    large = l4("large", "A100", 80)
    alone = written(of_lives(L4=8.0), small)
    # The cluster no longer has an A100, or the pod does not select it.
    assert written(found, small) == alone
    assert written(found, small, large, nodeSelector={"size": "small"}) == alone
    assert parse_bytes(written(found, small, large)) > 70 * GIB
    # The size of the only remaining model is the limit, because no run used this model.
    assert written(of_lives(A100=70.0), small) == "24Gi"
    assert parse_bytes(written(of_lives(A100=70.0))) > 70 * GIB


def test_no_more_is_requested_than_mps_permits_a_process() -> None:
    mps = l4(model="L4", sharing="mps")  # 4 replicas
    assert written(of_lives(L4=8.0), mps) == "6Gi"


def test_a_minimum_set_by_the_author_is_kept() -> None:
    assert written(of_lives(L4=8.0), l4(model="L4"), text="auto,min=30Gi") == "30Gi"
