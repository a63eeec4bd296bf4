"""Checks that a reader of a pod sees other pods only if the API server permits it."""

from typing import Any

import msgspec
import pytest

from headroom.console.shared_answers import SharedAnswers
from headroom.contract.gpunode import Reservation
from headroom.contract.kube import Pod
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.cluster.changes import Event
from headroom.core.journal.decision_records import Preempted, Victim
from headroom.runtime.server.auth import GetPod, Permission, ReadPath, ReviewFailed, User
from tests.builders import DISTRIBUTED, GIB, gpunode, kube_node, pod, reservation, shared, use
from tests.server.test_auth import GuardedApi

MOST_NAMESPACES = 32

EXPLAIN = "/v1/explain?pod=ml/waits"
VIEWS = (EXPLAIN, "/v1/decisions?pod=ml/waits", "/v1/score?pod=ml/waits&node=n")
OWN, OWN_NAMESPACE = GetPod("ml", "waits"), GetPod("ml", "")
WAITS = pod("14Gi", uid="u-waits", name="waits", namespace="ml")
#: Maps each namespace to the name and the GiB of its pod. There is also an unreserved pod.
HOLDERS = {"ml": ("colleague", 4), "secret-a": ("secret-one", 12), "secret-b": ("secret-two", 5)}
STRAY = use("u-secret-stray", "GPU-n", GIB, namespace="secret-c", name="secret-stray")


def held(namespace: str, name: str, gib: int) -> tuple[Reservation, Pod]:
    reserved = reservation({"GPU-n": gib * GIB}, name=name)
    running = pod(
        f"{gib}Gi", uid=f"u-{name}", name=name, namespace=namespace, node="n", phase="Running"
    )
    return msgspec.structs.replace(reserved, namespace=namespace), running


def world(
    *rights: Permission,
    holders: dict[str, tuple[str, int]] = HOLDERS,
    answers: SharedAnswers | None = None,
) -> GuardedApi:
    """Return a cluster in which pods fill the only 24 GiB GPU, so that a pending pod does
    not fit.
    """
    made = GuardedApi(answers=answers)
    made.reviews.rights["reader"] = set(rights)
    there = {space: held(space, *what) for space, what in holders.items()}
    reservations = {running.metadata.uid: reserved for reserved, running in there.values()}
    rows = [use(uid, "GPU-n", replica=f"GPU-n::{n}") for n, uid in enumerate(reservations)]
    device = shared("GPU-n", free=8, allocated=len(rows), used_bytes=GIB)
    node = gpunode(device, reservations=reservations, pods=[*rows, STRAY], plugin=DISTRIBUTED)
    pods: list[Event] = [PodSeen(running) for _, running in there.values()]
    made.api.writer.apply([NodeSeen(kube_node("n")), *pods, PodSeen(WAITS), GPUNodeSeen(node, 0)])
    victims = tuple(
        Victim(space, name, f"u-{name}", 7, False) for space, (name, _) in holders.items()
    )
    preempted = Preempted(0.0, 1, 1, 1, "n", victims, source="proposed")
    made.api.journal.note(WAITS, preempted, 0.0)
    return made


def read(made: GuardedApi, path: str) -> tuple[Any, str]:
    answer = made.get(path, "reader")
    assert answer.status_code == 200, answer.text
    return answer.json(), answer.text


@pytest.mark.parametrize("path", VIEWS)
def test_a_reader_of_one_pod_sees_no_other_pod(path: str) -> None:
    _, text = read(world(OWN), path)
    assert "secret" not in text
    assert "colleague" not in text


@pytest.mark.parametrize("path", VIEWS)
def test_a_reader_of_all_pods_of_a_namespace_sees_them(path: str) -> None:
    _, text = read(world(OWN, OWN_NAMESPACE, GetPod("secret-a", "")), path)
    assert "colleague" in text
    assert "secret-one" in text
    assert "secret-two" not in text
    assert "secret-b" not in text


@pytest.mark.parametrize("path", VIEWS)
def test_a_reader_of_the_path_sees_all_pods(path: str) -> None:
    _, text = read(world(ReadPath("get", path.partition("?")[0])), path)
    assert all(name in text for name, _ in HOLDERS.values())


def test_hidden_pods_are_counted() -> None:
    body, _ = read(world(OWN, OWN_NAMESPACE), EXPLAIN)
    (nearest,) = body["nearest"]
    assert [each["name"] for each in nearest["blockers"]] == ["colleague"]
    assert (nearest["hidden_blockers"], nearest["hidden_blockers_bytes"]) == (3, 18 * GIB)
    assert nearest["lines"][-1] == "  3 pods that you may not read hold 18.0 GiB"
    (candidate,) = nearest["candidates"]
    assert candidate["device"]["hidden_holders"] == 2
    preempt = body["last_decision"]["preempt"]
    assert [each["name"] for each in preempt["victims"]] == ["colleague"]
    assert preempt["hidden_victims"] == 2
    assert preempt["lines"][:2] == [
        "ml/colleague (priority 7) leaves node n",
        "2 pods that you may not read leave node n",
    ]


def test_the_suggestion_to_wait_for_a_hidden_pod_does_not_name_it() -> None:
    (wait,) = (each for each in read(world(OWN), EXPLAIN)[0]["advice"] if each["kind"] == "wait")
    assert wait["wait_for"] is None
    assert wait["sentence"] == (
        "wait for a pod on node n that you may not read: when it ends, the pod fits"
    )


def test_reviews_are_sent_for_a_limited_number_of_namespaces() -> None:
    many = {f"team-{n:03}": (f"of-{n:03}", 1) for n in range(MOST_NAMESPACES + 5)}
    permissions = {GetPod(namespace, "") for namespace in many}
    made = world(OWN, *permissions, holders=many)
    body, _ = read(made, EXPLAIN)
    asked = [
        each
        for each in made.reviews.asked
        if each in {("reader", permission) for permission in permissions}
    ]
    assert len(asked) == len(set(asked)) == MOST_NAMESPACES
    assert body["last_decision"]["preempt"]["hidden_victims"] == 5


def test_a_view_is_rejected_if_the_access_review_of_other_pods_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = world(OWN)

    def authorize(user: User, permission: Permission) -> bool:
        if isinstance(permission, GetPod) and permission != OWN:
            raise ReviewFailed("it is away")
        return permission == OWN

    monkeypatch.setattr(made.reviews, "authorize", authorize)
    answer = made.get(EXPLAIN, "reader")
    assert answer.status_code == 503
    assert "it is away" in answer.json()["detail"]
