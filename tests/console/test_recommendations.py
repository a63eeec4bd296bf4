"""/v1/recommendations: requests from profiles, and what they would free."""

import msgspec
import pytest

from contract.kube import ObjectMeta, OwnerReference, PodStatus
from contract.vramprofile import ProfileController, ProfileOwner, VRAMProfile, stamp
from extender.kube.profiles import Profiles
from extender.recommend.checkpoint import status_of
from extender.recommend.lives import DAY_S, Ending, Life
from extender.recommend.profile import Profile
from extender.state.changes import PodSeen, ProfileGone, ProfileSeen, Relisted
from tests.builders import GIB, pod
from tests.console.asking import WALL_S, Asked

#: When the lives of these profiles ended.
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
    asked.cluster.apply([PodSeen(msgspec.structs.replace(made, metadata=metadata))])


def test_recommendation_with_its_basis_and_what_it_frees(asked: Asked) -> None:
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
    assert body["teams"] == [{"namespace": "ml", "reclaimable_bytes": 28 * GIB - 2 * request}]
    assert (found["lives"], found["span_s"], found["tested"], found["missed"]) == (5, 3600, 2, 0)
    assert found["message"] == "5 lives, 1 h; 0 of 2 were above the recommendation"
    assert found["setting"] == ""


def test_few_lives_are_not_enough(asked: Asked) -> None:
    asked.context.profiles.apply([ProfileSeen(profile(lives=2))])
    add_pod(asked, "a", "16Gi")
    (found,) = asked.get("/v1/recommendations").json()["recommendations"]
    assert (found["request_bytes"], found["missing"]) == (None, "few-lives")
    assert found["message"] == "2 lives, 1 h: not yet; at least 3 lives are needed"
    assert (found["pods"], found["reclaimable_bytes"]) == (1, 0)


def test_lives_that_are_long_past_do_not_count(asked: Asked) -> None:
    asked.now_s = 200 * DAY_S
    asked.context.profiles.apply([ProfileSeen(profile())])
    (found,) = asked.get("/v1/recommendations").json()["recommendations"]
    assert (found["request_bytes"], found["missing"]) == (None, "old-lives")
    assert found["message"] == "5 lives, 1 h: not yet; they are too long ago"


def test_self_sized_programs_are_told_which_setting_decides(asked: Asked) -> None:
    asked.context.profiles.apply([ProfileSeen(profile(flat=True))])
    (found,) = asked.get("/v1/recommendations").json()["recommendations"]
    assert found["self_sized"]
    assert "--gpu-memory-utilization" in found["setting"]
    assert found["message"].endswith("; its size is a setting")


def test_a_request_that_is_too_small_frees_a_negative_amount(asked: Asked) -> None:
    asked.context.profiles.apply([ProfileSeen(profile())])
    add_pod(asked, "a", "4Gi")
    body = asked.get("/v1/recommendations").json()
    assert body["recommendations"][0]["reclaimable_bytes"] < -4 * GIB
    assert body["teams"] == [{"namespace": "ml", "reclaimable_bytes": 0}]


def test_pods_that_have_ended_free_nothing(asked: Asked) -> None:
    asked.context.profiles.apply([ProfileSeen(profile())])
    add_pod(asked, "a", "16Gi")
    (ended,) = asked.cluster.pods()
    status = PodStatus(phase="Succeeded")
    asked.cluster.apply([PodSeen(msgspec.structs.replace(ended, status=status))])
    (found,) = asked.get("/v1/recommendations").json()["recommendations"]
    assert (found["pods"], found["reclaimable_bytes"]) == (0, 0)


def test_one_namespace(asked: Asked) -> None:
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
