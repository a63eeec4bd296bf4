"""Tests the text of `kubectl headroom defrag` and the moves of --apply."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headroom.kubectl import defrag
from headroom.kubectl.cluster_changes import Created, NodeRead, Outcome, PodRead
from headroom.kubectl.defrag import applied, lines
from headroom.kubectl.eviction import Clock
from tests.kubectl import bodies
from tests.kubectl.fake_cluster import FakeCluster, serving_fake
from tests.kubectl.transcripts import run

GIB = 1 << 30


def move(name: str, *nodes: str, gib: int = 6) -> dict[str, Any]:
    return {
        "namespace": "team-a",
        "name": name,
        "uid": f"uid-{name}",
        "owner_kind": "ReplicaSet",
        "owner_name": "o",
        "priority": 0,
        "reserved_bytes": gib * GIB,
        "places": len(nodes),
        "nodes": list(nodes),
    }


def answer(outcome: str, message: str, *moves: Any, pod: str | None = "ml/p", **other: Any) -> Any:
    found = {
        "pod": pod,
        "alike": 1,
        "node": "gpu-a",
        "outcome": outcome,
        "message": message,
        "moves": list(moves),
        "devices": ["GPU-0", "GPU-1"],
        "gain_bytes": 20 * GIB,
        "moved_bytes": sum(each["reserved_bytes"] for each in moves),
        "stay": [],
    }
    return found | other


def body(*answers: Any, **other: Any) -> Any:
    found = {"answers": list(answers), "unanswered": 0, "examined_nodes": 9, "cut_short": False}
    return found | {"not_checked": ["CPU"]} | other


TWO = [move("one", "gpu-b", "gpu-c"), move("two", "gpu-b", "gpu-d", gib=4)]
MOVE = answer("move", "fits on node gpu-a after 2 pods are moved", *TWO)
ONE_LEFT = answer("move", "fits on node gpu-a after 1 pod is moved", TWO[1])
FITS = answer("fits", "fits on node gpu-a; no pod has to move")
BOUND = answer("bound", "bound to node gpu-a")


def test_moves_are_listed_in_order_with_their_effect() -> None:
    assert list(lines(body(MOVE))) == [
        "pod ml/p: fits on node gpu-a after 2 pods are moved",
        "  1. move team-a/one of ReplicaSet o, 6.0 GiB: it fits on 2 other nodes: gpu-b, gpu-c",
        "  2. move team-a/two of ReplicaSet o, 4.0 GiB: it fits on 2 other nodes: gpu-b, gpu-d",
        "  the pod gets 20.0 GiB on one of 2 GPUs",
        "  to move them: kubectl headroom defrag ml/p --apply",
        "not checked: CPU",
    ]


def test_a_limited_search_and_pods_that_stay_are_shown() -> None:
    stay = [{"reason": "places", "message": "fewer than 2 other nodes", "pods": 3}]
    none = answer("none", "no moves were found", alike=4, stay=stay)
    assert list(lines(body(none, cut_short=True, unanswered=2))) == [
        "pod ml/p (and 3 equal pods): no moves were found",
        "  not moved: 3 pods with fewer than 2 other nodes",
        "The search reached its limit after 9 nodes; 2 pods not examined. Fewer moves may be "
        "possible.",
        "not checked: CPU",
    ]
    many = move("one", *(f"gpu-{n}" for n in range(7)))
    freed = answer(
        "move", "the GPUs of node gpu-a hold no pod after 1 pod is moved", many, pod=None
    )
    assert list(lines(body(freed)))[1:4] == [
        "  1. move team-a/one of ReplicaSet o, 6.0 GiB: it fits on 7 other nodes: gpu-0, gpu-1, "
        "gpu-2, gpu-3, gpu-4 and 2 more",
        "  this frees 2 GPUs, with 20.0 GiB headroom",
        "  to move it: kubectl headroom defrag --free-node --node gpu-a --apply",
    ]


@dataclass
class Played:
    """Simulates the pods of one controller. After each eviction, the controller creates a pod on
    the next node in ``lands``.
    """

    lands: deque[str]
    later: int = 0
    pods: dict[str, Created] = field(default_factory=dict)
    evicted: list[str] = field(default_factory=list)
    now_s: float = 0.0
    cordoned: bool = False
    cordons: list[bool] = field(default_factory=list)

    def node(self, name: str) -> NodeRead:
        assert name == "gpu-a"
        return NodeRead("1", {}, self.cordoned)

    def set_cordon(self, name: str, cordoned: bool) -> None:
        assert name == "gpu-a"
        self.cordons.append(cordoned)

    def pod(self, namespace: str, name: str) -> PodRead | None:
        found = self.pods.get(name)
        return found and PodRead(found.uid, "ReplicaSet o", False, False, "o")

    def created_by(self, namespace: str, controller_uid: str) -> list[Created]:
        assert (namespace, controller_uid) == ("team-a", "o")
        return list(self.pods.values())

    def evict(self, namespace: str, name: str, uid: str) -> tuple[Outcome, str]:
        if self.later:
            self.later -= 1
            return Outcome.LATER, "the budget allows none"
        assert self.pods.pop(name).uid == uid
        assert self.cordoned or self.cordons == [True], "no successor can come back"
        self.evicted.append(name)
        if self.lands:
            node = self.lands.popleft()
            self.pods[f"{name}-2"] = Created(f"{name}-2", f"uid-{name}-2", node)
        return Outcome.ACCEPTED, ""

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def apply(
    *later: Any,
    lands: Sequence[str],
    first: Any = MOVE,
    waits: int = 0,
    cordoned: bool = False,
) -> tuple[list[str], bool, Played]:
    """Apply the advice ``first``. After that, the debug API returns the answers in ``later`` and
    repeats the last answer.
    """
    played = Played(deque(lands), waits, cordoned=cordoned)
    for name in ("one", "two", "other"):
        played.pods[name] = Created(name, f"uid-{name}", "gpu-a")
    answers = deque(later)

    def ask(node: str | None) -> Any:
        assert node == "gpu-a"
        return body(answers.popleft() if len(answers) > 1 else answers[0])

    clock = Clock(lambda: played.now_s, played.sleep)
    steps = list(applied(first, ask, played, 60, clock))
    return [step.line for step in steps], steps[-1].stops, played


CORDONED, UNCORDONED = "node gpu-a: cordoned, so that no pod comes back", "node gpu-a: uncordoned"
EVICTED = "pod team-a/one: evicted from node gpu-a"


def test_pods_are_moved_one_at_a_time_until_the_pod_is_bound() -> None:
    # The advice is requested again, because the first answer is older than the eviction.
    later = MOVE, ONE_LEFT, FITS, FITS, BOUND
    shown, stopped, played = apply(*later, lands=["gpu-c", "gpu-b"], waits=2)
    assert shown == [
        CORDONED,
        "pod team-a/one: waits: the budget allows none",
        EVICTED,
        "pod team-a/one: its successor team-a/one-2 is bound to node gpu-c, one of 2 simulated "
        "nodes",
        "pod team-a/two: evicted from node gpu-a",
        "pod team-a/two: its successor team-a/two-2 is bound to node gpu-b, one of 2 simulated "
        "nodes",
        UNCORDONED,
        "pod ml/p: bound to node gpu-a",
    ]
    assert (stopped, played.evicted, played.cordons) == (False, ["one", "two"], [True, False])


def test_a_freed_node_stays_cordoned() -> None:
    first = answer("move", "the GPUs hold no pod after 1 pod is moved", TWO[0], pod=None)
    free = answer("free", "the GPUs of node gpu-a hold no pod", pod=None)
    soon = answer("soon", "soon", pod=None)
    shown, stopped, played = apply(soon, free, lands=["gpu-b"], first=first)
    assert shown[3:] == [
        "the GPUs of node gpu-a hold no pod",
        "node gpu-a stays cordoned. To let pods in: kubectl uncordon gpu-a",
    ]
    assert (stopped, played.cordons) == (False, [True])


def test_a_node_that_was_cordoned_before_stays_cordoned() -> None:
    shown, stopped, played = apply(FITS, lands=["gpu-b"], cordoned=True)
    assert shown[-1] == "stopped: node gpu-a was cordoned before: kubectl uncordon gpu-a"
    assert (stopped, played.cordons) == (True, [])


@pytest.mark.parametrize(
    ("lands", "why"),
    [
        (
            ["gpu-x"],
            "stopped: successor team-a/one-2 is bound to node gpu-x, which is not one of 2 "
            "simulated nodes: gpu-b, gpu-c",
        ),
        (
            [""],
            "stopped: successor team-a/one-2 is not bound after 60 s. To see why: kubectl headroom "
            "why team-a/one-2",
        ),
        ([], "stopped: ReplicaSet team-a/o has created no successor within 60 s"),
    ],
)
def test_defrag_stops_at_the_first_successor_on_another_node(lands: list[str], why: str) -> None:
    shown, stopped, played = apply(ONE_LEFT, lands=lands)
    assert shown == [CORDONED, EVICTED, UNCORDONED, why]
    assert (stopped, played.evicted) == (True, ["one"])


@pytest.mark.parametrize(
    ("later", "why"),
    [
        (answer("none", "no moves"), "stopped: pod ml/p: no moves"),
        (answer("soon", "fits soon"), "stopped: after 60 s, pod ml/p: fits soon"),
        (FITS, "stopped: after 60 s, pod ml/p: fits on node gpu-a; no pod has to move"),
        (
            answer("move", "x", *(move(name, "gpu-b", "gpu-c") for name in ("three", "four"))),
            "stopped: the cluster has changed: 2 moves would be needed now, but only 1 "
            "remained; run the command again",
        ),
    ],
)
def test_defrag_stops_if_the_pod_is_not_bound(later: Any, why: str) -> None:
    shown, stopped, played = apply(later, lands=["gpu-b"])
    assert (shown[-1], stopped, played.evicted) == (why, True, ["one"])
    assert played.cordons == [True, False]


def test_defrag_stops_if_a_budget_never_allows_the_eviction() -> None:
    shown, stopped, played = apply(ONE_LEFT, lands=["gpu-b"], waits=99)
    assert shown[-1] == "stopped: pod team-a/one cannot be evicted: the budget allows none"
    assert (stopped, played.evicted) == (True, [])


def test_an_interrupt_uncordons_the_node() -> None:
    played = Played(deque(["gpu-b"]))
    played.pods["one"] = Created("one", "uid-one", "gpu-a")
    steps = applied(MOVE, lambda node: body(FITS), played, 60, Clock(lambda: 0.0, lambda s: None))
    assert [next(steps).line for _ in range(2)] == [CORDONED, EVICTED]
    with pytest.raises(KeyboardInterrupt):
        steps.throw(KeyboardInterrupt())
    assert played.cordons == [True, False]


def test_without_moves_no_pod_is_evicted() -> None:
    for first, stops in ((FITS, False), (answer("none", "no moves"), True)):
        shown, stopped, played = apply(FITS, lands=[], first=first)
        assert (shown, stopped) == ([f"pod ml/p: {first['message']}"], stops)
        assert (played.cordons, played.evicted) == ([], [])


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeCluster, str]]:
    with serving_fake(tmp_path) as found:
        now = [0.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds

        monkeypatch.setattr(defrag, "CLOCK", Clock(lambda: now[0], sleep))
        yield found


def test_the_command_reads_and_evicts_with_the_credentials_of_the_kubeconfig(
    fake: tuple[FakeCluster, str],
) -> None:
    cluster, kubeconfig = fake
    one = answer("move", "fits on node gpu-a after 1 pod is moved", TWO[0])
    cluster.answers["GET", "/v1/defrag"] = 200, body(one)
    cluster.add_pod("one")
    cluster.add(bodies.node("gpu-a"))
    options = "--kubeconfig", kubeconfig, "defrag", "p", "-n", "ml"
    advice = run(cluster.url, *options)
    assert (advice.returncode, advice.stderr) == (0, "")
    assert advice.stdout.splitlines()[0] == "pod ml/p: fits on node gpu-a after 1 pod is moved"
    assert cluster.requests == ["GET /v1/defrag"]
    stopped = run(cluster.url, *options, "--apply", "--timeout", "10s")
    assert stopped.returncode == 1
    assert stopped.stdout.splitlines()[-4:] == [
        CORDONED,
        EVICTED,
        UNCORDONED,
        "stopped: ReplicaSet team-a/o has created no successor within 10 s",
    ]
    assert [each["metadata"]["name"] for each in cluster.evicted] == ["one"]
    assert cluster.requests[2:7] == [
        "GET /api/v1/nodes/gpu-a",
        "PATCH /api/v1/nodes/gpu-a",
        "GET /api/v1/namespaces/team-a/pods/one",
        "GET /api/v1/namespaces/team-a/pods",
        "POST /api/v1/namespaces/team-a/pods/one/eviction",
    ]


def test_invalid_options_are_rejected(fake: tuple[FakeCluster, str]) -> None:
    cluster, kubeconfig = fake
    cluster.answers["GET", "/v1/defrag"] = 200, body(answer("none", "no moves"))

    def outcome(*arguments: str) -> tuple[int, str]:
        shown = run(cluster.url, "--kubeconfig", kubeconfig, "defrag", *arguments)
        return shown.returncode, shown.stderr

    assert outcome("p", "--free-node") == (
        2,
        "kubectl headroom: --free-node needs no pod: remove one of them\n",
    )
    code, said = outcome("--apply")
    assert (code, "needs the name of a waiting pod" in said) == (2, True)
    code, said = outcome("p", "--timeout", "x")
    assert (code, "--timeout: 'x' is not a duration" in said) == (2, True)
    assert outcome("p") == (1, "")
    assert outcome("p", "-o", "json") == (0, "")
