"""Tests /v1/recommendations, which recommends requests from profiles and shows how much memory they
would free.
"""

import msgspec
import pytest

from headroom.console.facts.request_whatif import Outcome
from headroom.console.views.recommendations import accepted_message
from headroom.contract.kube import ObjectMeta, OwnerReference, PodStatus
from headroom.contract.quantity import format_bytes, gib
from headroom.contract.vramprofile import ProfileController, ProfileOwner, VRAMProfile, stamp
from headroom.contract.watched import (
    GPUNodeSeen,
    NodeSeen,
    PodSeen,
    ProfileGone,
    ProfileSeen,
    Relisted,
)
from headroom.core.recommend.lives import DAY_S, Ending, Life
from headroom.core.recommend.profile import Profile
from headroom.core.recommend.profile_status import status_of
from headroom.runtime.kube.profiles import Profiles
from tests.builders import DISTRIBUTED, GIB, gpunode, kube_node, pod, reservation, shared, use
from tests.console.asking import WALL_S, Asked

#: Time at which the runs in these profiles ended.
ENDED_S = WALL_S - 3600


def profile(
    name: str = "llm",
    lives: int = 5,
    namespace: str = "ml",
    flat: bool = False,
    program: str = "p1",
    ended_s: float = ENDED_S,
) -> VRAMProfile:
    kept = Profile()
    peak = 8 * GIB
    for _ in range(lives):
        life = Life(peak, ended_s - 3600, ended_s, Ending.COMPLETED, peak if flat else None)
        kept.container("main", "NVIDIA L4").record(program, life)
    owner = ProfileOwner(kind="Deployment", name=name, api_version="apps/v1")
    families = {("main", "NVIDIA L4"): "vLLM"}
    status = status_of(kept, owner, families, ended_s)
    controllers = [ProfileController(kind="ReplicaSet", name=name)]
    status = msgspec.structs.replace(status, controllers=controllers)
    metadata = ObjectMeta(namespace=namespace, name=f"deployment-{name}")
    return VRAMProfile(metadata=metadata, status=status)


def recorded_profile(lives: list[Life]) -> VRAMProfile:
    """Return a profile of the Deployment llm with these runs."""
    kept = Profile()
    for life in lives:
        kept.container("main", "NVIDIA L4").record("p1", life)
    owner = ProfileOwner(kind="Deployment", name="llm", api_version="apps/v1")
    status = status_of(kept, owner, {}, ENDED_S)
    return VRAMProfile(metadata=ObjectMeta(namespace="ml", name="deployment-llm"), status=status)


@pytest.fixture
def asked() -> Asked:
    return Asked()


def add_pod(asked: Asked, name: str, vram: str | None, owner: str = "llm") -> None:
    made = pod(vram, uid=f"u-{name}", name=name, namespace="ml")
    reference = OwnerReference(
        api_version="apps/v1", kind="ReplicaSet", name=f"{owner}-5d4f", uid="rs", controller=True
    )
    metadata = msgspec.structs.replace(
        made.metadata, owner_references=[reference], labels={"pod-template-hash": "5d4f"}
    )
    asked.writer.apply([PodSeen(msgspec.structs.replace(made, metadata=metadata))])


def test_a_recommendation_has_its_basis_and_the_memory_that_it_frees(asked: Asked) -> None:
    asked.context.profiles.apply([ProfileSeen(profile())])
    add_pod(asked, "a", "16Gi")
    add_pod(asked, "b", "12Gi")
    add_pod(asked, "other", "16Gi", owner="other")
    body = asked.get("/v1/recommendations").json()
    (found,) = body["recommendations"]
    assert (found["namespace"], found["owner_kind"], found["owner_name"], found["profile"]) == (
        *("ml", "Deployment", "llm"),
        "deployment-llm",
    )
    assert (found["container"], found["model"], found["program"]) == ("main", "NVIDIA L4", "vLLM")
    request = found["request_bytes"]
    assert request % (64 << 20) == 0
    assert 8 * GIB < request < 11 * GIB
    assert (found["pods"], found["current_bytes"]) == (2, 16 * GIB)
    assert found["reclaimable_bytes"] == 28 * GIB - 2 * request
    freed = {"namespace": "ml", "reclaimable_bytes": 28 * GIB - 2 * request}
    owner = {"kind": "Deployment", "name": "llm", "pods": 2}
    assert body["teams"] == [{**freed, "owners": [{**freed, **owner}]}]
    assert body["accepted"] is None
    assert (found["lives"], found["span_s"], found["tested"], found["missed"]) == (5, 3600, 2, 0)
    assert found["message"] == "5 lives, 1 h; 0 of 2 were above the recommendation"
    assert found["setting"] == ""


def test_too_few_runs_give_no_recommendation(asked: Asked) -> None:
    asked.context.profiles.apply([ProfileSeen(profile(lives=2))])
    add_pod(asked, "a", "16Gi")
    (found,) = asked.get("/v1/recommendations").json()["recommendations"]
    assert (found["request_bytes"], found["missing"]) == (None, "few-lives")
    assert found["message"] == "2 lives, 1 h: no recommendation yet; at least 3 lives are needed"
    assert (found["pods"], found["reclaimable_bytes"]) == (1, 0)


def test_old_runs_do_not_count(asked: Asked) -> None:
    asked.now_s = 200 * DAY_S
    asked.context.profiles.apply([ProfileSeen(profile())])
    (found,) = asked.get("/v1/recommendations").json()["recommendations"]
    assert (found["request_bytes"], found["missing"]) == (None, "old-lives")
    assert found["message"] == "5 lives, 1 h: no recommendation yet; these lives ended too long ago"


def test_self_sizing_programs_get_the_name_of_the_deciding_setting(asked: Asked) -> None:
    asked.context.profiles.apply([ProfileSeen(profile(flat=True))])
    (found,) = asked.get("/v1/recommendations").json()["recommendations"]
    assert found["self_sized"]
    assert "--gpu-memory-utilization" in found["setting"]
    assert found["message"].endswith("; a setting of the program sets its size")


def test_a_request_that_is_too_small_frees_a_negative_amount(asked: Asked) -> None:
    asked.context.profiles.apply([ProfileSeen(profile())])
    add_pod(asked, "a", "4Gi")
    body = asked.get("/v1/recommendations").json()
    assert body["recommendations"][0]["reclaimable_bytes"] < -4 * GIB
    assert body["teams"] == [{"namespace": "ml", "reclaimable_bytes": 0, "owners": []}]


def test_ended_pods_free_no_memory(asked: Asked) -> None:
    asked.context.profiles.apply([ProfileSeen(profile())])
    add_pod(asked, "a", "16Gi")
    (ended,) = asked.cluster.pods()
    status = PodStatus(phase="Succeeded")
    asked.writer.apply([PodSeen(msgspec.structs.replace(ended, status=status))])
    (found,) = asked.get("/v1/recommendations").json()["recommendations"]
    assert (found["pods"], found["reclaimable_bytes"]) == (0, 0)


def test_a_whole_device_is_recommended_if_runs_differ_too_much(asked: Asked) -> None:
    kept = Profile()
    for gib_used in (2, 20, 3, 15, 2):
        life = Life(gib_used * GIB, ENDED_S - 3600, ENDED_S, Ending.COMPLETED)
        kept.container("main", "NVIDIA L4").record("p1", life)
    kept.container("main", "NVIDIA L4").memory_bytes = 24 * GIB
    status = status_of(kept, ProfileOwner(kind="StatefulSet", name="nb"), {}, ENDED_S)
    metadata = ObjectMeta(namespace="ml", name="statefulset-nb")
    asked.context.profiles.apply([ProfileSeen(VRAMProfile(metadata=metadata, status=status))])
    (found,) = asked.get("/v1/recommendations").json()["recommendations"]
    assert found["request_bytes"] == 24 * GIB
    assert found["message"] == (
        "5 lives, 1 h; 0 of 2 were above the recommendation; lives differ so much that only the"
        " whole device is safe"
    )


def test_recommendations_can_be_limited_to_one_namespace(asked: Asked) -> None:
    asked.context.profiles.apply([ProfileSeen(profile()), ProfileSeen(profile(namespace="b"))])
    both = asked.get("/v1/recommendations").json()["recommendations"]
    assert [each["namespace"] for each in both] == ["b", "ml"]
    (found,) = asked.get("/v1/recommendations?namespace=b").json()["recommendations"]
    assert found["namespace"] == "b"


def test_profiles_are_found_by_the_controllers_of_pods() -> None:
    profiles = Profiles()
    controller = ProfileController(kind="ReplicaSet", name="llm")
    first = profile()
    profiles.apply([ProfileSeen(first)])
    assert profiles.of("ml", controller) is first
    assert profiles.of("other", controller) is None
    later = msgspec.structs.replace(
        first,
        metadata=ObjectMeta(namespace="ml", name="deployment-llm2"),
        status=msgspec.structs.replace(first.status, observed_at=stamp(ENDED_S + DAY_S)),
    )
    profiles.apply([ProfileSeen(later)])
    assert profiles.of("ml", controller) is later
    profiles.apply([ProfileGone("ml", "deployment-llm2")])
    assert profiles.of("ml", controller) is first
    profiles.apply([Relisted(VRAMProfile, (), 0.0)])
    assert profiles.of("ml", controller) is None
    assert profiles.all() == []


def two_models(first_gib: int = 8, second_gib: int = 4) -> VRAMProfile:
    """Return a profile of one container, with runs on the devices of ``tests.builders`` and on a
    model that no node has.
    """
    kept = Profile()
    for model, peak in (("NVIDIA L4", first_gib * GIB), ("H200", second_gib * GIB)):
        for _ in range(5):
            life = Life(peak, ENDED_S - 3600, ENDED_S, Ending.COMPLETED)
            kept.container("main", model).record("p1", life)
    owner = ProfileOwner(kind="Deployment", name="llm", api_version="apps/v1")
    status = msgspec.structs.replace(
        status_of(kept, owner, {}, ENDED_S),
        controllers=[ProfileController(kind="ReplicaSet", name="llm")],
    )
    metadata = ObjectMeta(namespace="ml", name="deployment-llm")
    return VRAMProfile(metadata=metadata, status=status)


def test_a_pod_counts_once_although_two_models_have_recommendations(asked: Asked) -> None:
    asked.context.profiles.apply([ProfileSeen(two_models())])
    asked.add_node("a")
    model = asked.cluster.gpunodes()[0].status.devices[0].model  # type: ignore[union-attr]
    add_pod(asked, "waits", "16Gi")
    body = asked.get("/v1/recommendations").json()
    by_model = {each["model"]: each for each in body["recommendations"]}
    assert {name: each["pods"] for name, each in by_model.items()} == {"NVIDIA L4": 1, "H200": 0}
    freed = 16 * GIB - by_model["NVIDIA L4"]["request_bytes"]
    assert body["teams"][0]["reclaimable_bytes"] == freed
    assert body["teams"][0]["owners"][0]["pods"] == 1
    assert model not in by_model


def test_a_pod_counts_for_the_model_of_its_device(asked: Asked) -> None:
    asked.context.profiles.apply([ProfileSeen(two_models(4, 8))])
    bind(asked, "a", "16Gi", "GPU-n-0", model="NVIDIA L4")
    body = asked.get("/v1/recommendations").json()
    by_model = {each["model"]: each for each in body["recommendations"]}
    assert {name: each["pods"] for name, each in by_model.items()} == {"NVIDIA L4": 1, "H200": 0}
    # The annotation has one amount for all models, so it has the largest amount.
    assert (
        by_model["NVIDIA L4"]["reclaimable_bytes"] == 16 * GIB - by_model["H200"]["request_bytes"]
    )


def test_a_pod_without_an_annotation_counts_with_its_reservation(asked: Asked) -> None:
    asked.context.profiles.apply([ProfileSeen(profile())])
    bind(asked, "a", None, "GPU-n-0", reserved=12 * GIB)
    (found,) = asked.get("/v1/recommendations").json()["recommendations"]
    assert (found["pods"], found["current_bytes"]) == (1, 12 * GIB)
    assert found["reclaimable_bytes"] == 12 * GIB - found["request_bytes"]


def bind(
    asked: Asked, name: str, vram: str | None, uuid: str, reserved: int = 16 * GIB, **device: str
) -> None:
    """Bind a pod of ``llm`` to a device of node n."""
    add_pod(asked, name, vram)
    (made,) = (each for each in asked.cluster.pods() if each.metadata.name == name)
    made = msgspec.structs.replace(made, spec=msgspec.structs.replace(made.spec, node_name="n"))
    held = {made.metadata.uid: reservation({uuid: reserved})}
    seen = gpunode(
        shared(uuid, free=3, allocated=1, **device),
        reservations=held,
        pods=[use(made.metadata.uid, uuid, GIB, replica=f"{uuid}::0")],
        plugin=DISTRIBUTED,
    )
    asked.writer.apply([NodeSeen(kube_node("n")), GPUNodeSeen(seen, 0.0), PodSeen(made)])


def test_accepting_recommendations_frees_enough_memory_for_a_pending_pod(asked: Asked) -> None:
    asked.context.profiles.apply([ProfileSeen(profile())])
    bind(asked, "a", "16Gi", "GPU-n-0")
    asked.writer.apply([PodSeen(pod("12Gi", uid="u-waits", name="waits"))])
    body = asked.get("/v1/recommendations?accepted=true").json()
    request = body["recommendations"][0]["request_bytes"]
    found = body["accepted"]
    assert (found["pods"], found["left_out"], found["unschedulable"]) == (1, 0, 0)
    assert (found["pending"], found["pending_fit"], found["pending_fit_after"]) == (1, 0, 1)
    assert found["headroom_bytes_after"] - found["headroom_bytes"] == 16 * GIB - request
    assert [found[f"empty_devices{when}"] for when in ("", "_again", "_after")] == [0, 0, 0]
    assert found["message"] == (
        f"1 pod created again with the recommended requests: {gib(16 * GIB - request)} more free;"
        " GPUs without a pod: 0 instead of 0; of 1 pending, 1 would fit instead of 0"
    )


def test_the_message_names_pods_that_would_become_unschedulable() -> None:
    found = Outcome(
        pods=4,
        left_out=0,
        unschedulable=3,
        empty_devices=0,
        empty_devices_again=0,
        empty_devices_after=3,
        headroom_bytes=40 * GIB,
        headroom_bytes_after=60 * GIB,
        pending=0,
        pending_fit=0,
        pending_fit_after=0,
        not_checked=(),
    )
    assert accepted_message(found) == (
        f"4 pods created again with the recommended requests: {gib(20 * GIB)} more free; GPUs"
        " without a pod: 3 instead of 0; 3 of the pods would be unschedulable"
    )


def test_recommendations_of_another_namespace_are_not_accepted(asked: Asked) -> None:
    asked.context.profiles.apply([ProfileSeen(profile())])
    bind(asked, "a", "16Gi", "GPU-n-0")
    found = asked.get("/v1/recommendations?accepted=true&namespace=b").json()["accepted"]
    assert found["pods"] == 0
    assert found["message"] == "no bound pod would request another amount"


def test_a_pending_pod_gets_the_recommendation_with_which_it_fits(asked: Asked) -> None:
    asked.context.profiles.apply([ProfileSeen(profile())])
    bind(asked, "a", "12Gi", "GPU-n-0", reserved=12 * GIB)
    add_pod(asked, "waits", "16Gi")
    (row,) = asked.get("/v1/recommendations").json()["recommendations"]
    text = format_bytes(row["request_bytes"])
    (waits,) = asked.get("/v1/pending").json()["pods"]
    assert waits["recommended"] == text
    body = asked.get("/v1/explain?pod=ml/waits").json()
    assert body["advice"][0]["kind"] == "recommended"
    # The annotation names the container, because a pod can have several containers.
    assert body["suggestions"][0] == (
        f"lower headroom.gpu/vram to main={text}, as recommended from past lives of this workload:"
        " the pod fits on 1 node (not checked: CPU, memory and other resources)"
    )
    assert body["suggestions"][-1] == (
        "if the program needs no more than 12Gi, lower headroom.gpu/vram to it: that much is free"
        " now (not checked: CPU, memory and other resources); its recorded lives used at most"
        " 8.1 GiB"
    )


def test_a_recommended_request_that_does_not_fit_is_not_suggested(asked: Asked) -> None:
    asked.context.profiles.apply([ProfileSeen(profile())])
    bind(asked, "a", "18Gi", "GPU-n-0", reserved=18 * GIB)
    add_pod(asked, "waits", "10Gi")
    body = asked.get("/v1/explain?pod=ml/waits").json()
    assert body["verdict"] == "rejected"
    assert "recommended" not in [each["kind"] for each in body["advice"]]
    # Runs that used 8 GiB are recorded, so no lower request is suggested.
    assert "lower" not in [each["kind"] for each in body["advice"]]
