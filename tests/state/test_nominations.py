"""Checks that nodes are held for nominated pods, against pods of equal or lower priority, for a
limited time.
"""

import msgspec
import pytest

from headroom.contract.annotations import PREEMPTING
from headroom.contract.kube import Pod
from headroom.contract.preemption import Attempt, encode_attempt
from headroom.contract.watched import PodGone, PodSeen
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.trackers.nominations import Nominations, yields
from headroom.core.placement.policy import Rules
from headroom.core.tracker import LastSeen
from tests.builders import NOW_S, pod
from tests.state.evictions import On, full_node, newcomer
from tests.state.states import EPOCH_S, STALE_AFTER_S

CLEARED_S = 15.0
EXPECTED_S = 5.0
LONGEST_S = 1800.0

HOLD_S = 60.0


def nominee(node: str | None = "n", priority: int = 10, name: str = "nominee") -> Pod:
    return newcomer(12, priority, name, nominated=node)


def ours(node: str = "n", attempt: str = "1") -> Pod:
    annotations = {PREEMPTING: encode_attempt(Attempt(attempt, node))}
    return newcomer(12, 10, "nominee", annotations=annotations)


class Nominees(Nominations):
    """Nominations in which the test decides whether pods are leaving the nodes."""

    def __init__(self, hold_s: float, ours: bool) -> None:
        super().__init__(hold_s, ours, lambda _: self.left)
        self.left = False


def held(nominations: Nominees, now_s: float, left: bool = False) -> list[str]:
    nominations.left = left
    return sorted(node for _, node in nominations.current(now_s))


def test_a_node_is_held_while_a_pod_leaves_and_some_time_after() -> None:
    nominations = Nominees(HOLD_S, ours=False)
    nominations.pod_seen(nominee(), True)
    assert held(nominations, 0.0, left=True) == ["n"]
    assert held(nominations, 1000.0, left=True) == ["n"]
    assert held(nominations, 1000.0 + HOLD_S) == ["n"]
    assert held(nominations, 1000.1 + HOLD_S) == []
    # An update of the pod does not start another hold.
    nominations.pod_seen(nominee(), True)
    assert held(nominations, 1001.0 + HOLD_S) == []
    nominations.pod_seen(nominee("m"), True)
    assert held(nominations, 1001.0 + HOLD_S) == ["m"]


def test_a_cleared_nomination_still_counts_for_some_time() -> None:
    nominations = Nominees(HOLD_S, ours=False)
    nominations.pod_seen(nominee(), True)
    assert held(nominations, 0.0, left=True) == ["n"]
    assert held(nominations, 1.0) == ["n"]
    nominations.pod_seen(nominee(None), True)
    assert held(nominations, 1.0) == ["n"]
    assert held(nominations, 1.0 + CLEARED_S) == ["n"]
    assert held(nominations, 1.1 + CLEARED_S) == []


def test_a_nomination_without_victims_ends_when_it_is_cleared() -> None:
    """kube-scheduler also nominates a pod while it waits at Permit for the rest of its group. If
    the group is rejected, its pods must not hold memory any more."""
    nominations = Nominees(HOLD_S, ours=False)
    nominations.pod_seen(nominee(), True)
    assert held(nominations, 0.0) == ["n"]
    nominations.pod_gone("other", LastSeen("m", ended=True))
    nominations.pod_seen(nominee(None), True)
    assert held(nominations, 0.0) == []


def test_a_pod_that_left_at_once_counts_as_a_victim() -> None:
    for answered in (False, True):
        nominations = Nominees(HOLD_S, ours=False)
        if answered:
            nominations.expect(nominee(None), "n", 0.0)
        nominations.pod_seen(nominee(), True)
        if not answered:
            nominations.pod_gone("victim", LastSeen("n", ended=True))
        nominations.pod_seen(nominee(None), True)
        assert held(nominations, 0.0) == ["n"]
        assert held(nominations, CLEARED_S) == ["n"]
        assert held(nominations, CLEARED_S + 0.1) == []


def test_the_nominations_of_a_group_end_with_the_group() -> None:
    nominations = Nominees(HOLD_S, ours=False)
    nominations.pod_seen(nominee(), True)
    nominations.pod_seen(nominee("m", name="preemptor"), True)
    nominations.pod_gone("victim", LastSeen("m", ended=True))
    for name in ("nominee", "preemptor", "unknown"):
        nominations.give_up(name)
    assert held(nominations, 0.0) == ["m"]


def test_an_answer_to_kube_scheduler_counts_until_it_nominates() -> None:
    nominations = Nominees(HOLD_S, ours=False)
    nominations.expect(nominee(None), "n", 0.0)
    assert held(nominations, EXPECTED_S) == ["n"]
    assert held(nominations, EXPECTED_S + 0.1) == []
    nominations.pod_seen(nominee(), True)
    assert held(nominations, EXPECTED_S + HOLD_S) == ["n"]


def test_an_expected_nomination_that_never_shows_up_ends() -> None:
    """The pod was deleted while kube-scheduler searched for victims, so no later event mentions
    it."""
    nominations = Nominees(HOLD_S, ours=False)
    nominations.expect(nominee(None), "n", 0.0)
    assert held(nominations, 1.0, left=True) == ["n"]
    assert held(nominations, EXPECTED_S + 0.1, left=True) == []
    assert held(nominations, 3600.0, left=True) == []
    assert not nominations.node_of("nominee")


def test_an_expected_nomination_becomes_a_normal_one_when_it_is_seen() -> None:
    nominations = Nominees(HOLD_S, ours=False)
    nominations.expect(nominee(None), "n", 0.0)
    nominations.pod_seen(nominee("n"), True)
    assert held(nominations, 100.0, left=True) == ["n"]


def test_a_hold_ends_even_if_pods_keep_leaving_the_node() -> None:
    nominations = Nominees(HOLD_S, ours=False)
    nominations.pod_seen(nominee(), True)
    assert held(nominations, 0.0, left=True) == ["n"]
    assert held(nominations, LONGEST_S, left=True) == ["n"]
    assert held(nominations, LONGEST_S + 0.1, left=True) == []
    nominations.pod_seen(nominee(), True)
    assert held(nominations, LONGEST_S + 1.0, left=True) == []


def test_headrooms_nominations_count_only_if_headroom_preempts() -> None:
    for allowed in (False, True):
        nominations = Nominees(HOLD_S, ours=allowed)
        nominations.pod_seen(ours(), True)
        assert held(nominations, 0.0) == (["n"] if allowed else [])
    # A second attempt for the same node starts a new hold.
    assert held(nominations, HOLD_S + 1.0) == []
    nominations.pod_seen(ours(attempt="2"), True)
    assert held(nominations, HOLD_S + 1.0) == ["n"]


@pytest.mark.parametrize("text", ["", "no json", "[]", '{"node": 5}', "{}", "[" * 5000])
def test_invalid_annotations_of_users_are_ignored(text: str) -> None:
    nominations = Nominees(HOLD_S, ours=True)
    nominations.pod_seen(newcomer(12, annotations={PREEMPTING: text}), True)
    assert held(nominations, 0.0) == []


@pytest.mark.parametrize(
    ("of", "both", "expected"),
    [
        pytest.param(pod(uid="p", priority=9), False, True, id="lower yields"),
        pytest.param(pod(uid="p", priority=10), False, True, id="equal yields"),
        pytest.param(pod(uid="p", priority=11), False, False, id="higher does not"),
        pytest.param(pod(uid="p", priority=10, created="2020"), True, False, id="an older nominee"),
        pytest.param(pod(uid="p", priority=10, created="2030"), True, True, id="a younger nominee"),
        pytest.param(pod(uid="p", priority=9, created="2020"), True, True, id="a lower nominee"),
        pytest.param(nominee(), True, False, id="no pod yields to itself"),
    ],
)
def test_pods_of_higher_priority_take_precedence(of: Pod, both: bool, expected: bool) -> None:
    assert yields(of, nominee(), both) is expected


def test_the_hold_ends_when_the_nominated_pod_is_bound_or_deleted() -> None:
    for last in (PodGone("nominee"), PodSeen(bound(nominee(), "elsewhere"))):
        state = ClusterWriter(Rules(), STALE_AFTER_S, EPOCH_S)
        state.apply([*full_node("n", [On("a", 20, 1)]), PodSeen(nominee())])
        assert [*state.cluster.holds.nominees_before(newcomer(3, 10, "other"), NOW_S)] == ["n"]
        state.apply([last])
        assert state.cluster.holds.nominees_before(newcomer(3, 10, "other"), NOW_S) == {}


def bound(of: Pod, node: str) -> Pod:
    return msgspec.structs.replace(of, spec=msgspec.structs.replace(of.spec, node_name=node))
