"""For whom places are held, against whom, and for how long."""

import msgspec
import pytest

from headroom.contract.annotations import PREEMPTING
from headroom.contract.kube import Pod
from headroom.contract.preemption import Attempt, encode_attempt
from headroom.contract.watched import PodGone, PodSeen
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.trackers.nominations import Nominations, yields
from headroom.core.cluster.trackers.tracker import LastSeen
from headroom.core.placement.policy import Rules
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
    """Nominations on nodes that pods are leaving, or not."""

    def __init__(self, hold_s: float, ours: bool) -> None:
        super().__init__(hold_s, ours, lambda _: self.left)
        self.left = False


def held(nominations: Nominees, now_s: float, left: bool = False) -> list[str]:
    nominations.left = left
    return sorted(node for _, node in nominations.current(now_s))


def test_a_node_is_held_while_a_pod_leaves_and_a_while_longer() -> None:
    nominations = Nominees(HOLD_S, ours=False)
    nominations.pod_seen(nominee(), True)
    assert held(nominations, 0.0, left=True) == ["n"]
    assert held(nominations, 1000.0, left=True) == ["n"]
    assert held(nominations, 1000.0 + HOLD_S) == ["n"]
    assert held(nominations, 1000.1 + HOLD_S) == []
    # Seen again it is not held again.
    nominations.pod_seen(nominee(), True)
    assert held(nominations, 1001.0 + HOLD_S) == []
    nominations.pod_seen(nominee("m"), True)
    assert held(nominations, 1001.0 + HOLD_S) == ["m"]


def test_a_nomination_that_was_taken_back_counts_a_while_longer() -> None:
    nominations = Nominees(HOLD_S, ours=False)
    nominations.pod_seen(nominee(), True)
    assert held(nominations, 0.0, left=True) == ["n"]
    assert held(nominations, 1.0) == ["n"]
    nominations.pod_seen(nominee(None), True)
    assert held(nominations, 1.0) == ["n"]
    assert held(nominations, 1.0 + CLEARED_S) == ["n"]
    assert held(nominations, 1.1 + CLEARED_S) == []


def test_a_nomination_for_which_no_pod_left_ends_when_it_is_taken_back() -> None:
    """kube-scheduler also nominates a pod while it waits at Permit for the rest of its group. If
    the group is rejected, nothing of it may hold memory."""
    nominations = Nominees(HOLD_S, ours=False)
    nominations.pod_seen(nominee(), True)
    assert held(nominations, 0.0) == ["n"]
    nominations.pod_gone("other", LastSeen("m", ended=True))
    nominations.pod_seen(nominee(None), True)
    assert held(nominations, 0.0) == []


def test_a_victim_that_was_gone_at_once_counts_as_left() -> None:
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


def test_the_nominations_of_a_group_end_with_it() -> None:
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
    """The pod was deleted while kube-scheduler searched victims: no event mentions it any more."""
    nominations = Nominees(HOLD_S, ours=False)
    nominations.expect(nominee(None), "n", 0.0)
    assert held(nominations, 1.0, left=True) == ["n"]
    assert held(nominations, EXPECTED_S + 0.1, left=True) == []
    assert held(nominations, 3600.0, left=True) == []
    assert not nominations.node_of("nominee")


def test_an_expected_nomination_that_is_seen_is_held_as_any_other() -> None:
    nominations = Nominees(HOLD_S, ours=False)
    nominations.expect(nominee(None), "n", 0.0)
    nominations.pod_seen(nominee("n"), True)
    assert held(nominations, 100.0, left=True) == ["n"]


def test_a_hold_ends_though_pods_leave_the_node_all_the_time() -> None:
    nominations = Nominees(HOLD_S, ours=False)
    nominations.pod_seen(nominee(), True)
    assert held(nominations, 0.0, left=True) == ["n"]
    assert held(nominations, LONGEST_S, left=True) == ["n"]
    assert held(nominations, LONGEST_S + 0.1, left=True) == []
    nominations.pod_seen(nominee(), True)
    assert held(nominations, LONGEST_S + 1.0, left=True) == []


def test_our_own_nomination_counts_only_if_we_preempt() -> None:
    for allowed in (False, True):
        nominations = Nominees(HOLD_S, ours=allowed)
        nominations.pod_seen(ours(), True)
        assert held(nominations, 0.0) == (["n"] if allowed else [])
    # A second attempt for the same node is a place of its own.
    assert held(nominations, HOLD_S + 1.0) == []
    nominations.pod_seen(ours(attempt="2"), True)
    assert held(nominations, HOLD_S + 1.0) == ["n"]


@pytest.mark.parametrize("text", ["", "no json", "[]", '{"node": 5}', "{}", "[" * 5000])
def test_what_users_write_there_breaks_nothing(text: str) -> None:
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
def test_which_pod_takes_precedence(of: Pod, both: bool, expected: bool) -> None:
    assert yields(of, nominee(), both) is expected


def test_the_hold_ends_when_the_nominee_is_bound_or_gone() -> None:
    for last in (PodGone("nominee"), PodSeen(bound(nominee(), "elsewhere"))):
        state = ClusterWriter(Rules(), STALE_AFTER_S, EPOCH_S)
        state.apply([*full_node("n", [On("a", 20, 1)]), PodSeen(nominee())])
        assert [*state.holds.nominees_before(newcomer(3, 10, "other"), NOW_S)] == ["n"]
        state.apply([last])
        assert state.holds.nominees_before(newcomer(3, 10, "other"), NOW_S) == {}


def bound(of: Pod, node: str) -> Pod:
    return msgspec.structs.replace(of, spec=msgspec.structs.replace(of.spec, node_name=node))
