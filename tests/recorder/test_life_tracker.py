"""Tests which runs in reports are active and which have ended, and how they ended."""

from typing import Any

import pytest

from headroom.contract.annotations import Amount, Bytes, ReplicaShare, Share
from headroom.contract.gpunode import GPUNodeStatus
from headroom.contract.vramprofile import stamp
from headroom.core.recommend.lives import DAY_S, Ending
from headroom.recorder.life_tracker import LifeTracker, TrackedLife
from headroom.recorder.pod_facts import PodFacts
from tests.recorder.facts import GIB, HOUR_S, NODE, NOW_S, ended, facts, report, use


def followed(
    tracker: LifeTracker,
    status: GPUNodeStatus,
    pods: dict[str, PodFacts],
    gone: dict[str, PodFacts] | None = None,
    now_s: float = NOW_S,
    node: str = NODE,
) -> list[TrackedLife]:
    return tracker.follow({node: status}, pods, gone or {}, now_s)


def begun(*uses: Any) -> LifeTracker:
    tracker = LifeTracker()
    assert followed(tracker, report(*(uses or (use(8),))), {"u1": facts()}) == []
    return tracker


def test_a_run_has_the_highest_peak_of_its_devices() -> None:
    tracker = begun(use(8), use(9, NOW_S - HOUR_S + 5, device="GPU-1"))
    (running,) = tracker.running
    assert (running.container, running.model, running.program.fingerprint) == ("main", "L4", "p1")
    assert running.life.peak_bytes == 9 * GIB
    assert (running.life.started_s, running.life.until_s) == (NOW_S - HOUR_S, NOW_S)
    assert running.life.ending is None
    # The memory does not include the driver's part.
    assert running.memory_bytes == 23 * GIB


@pytest.mark.parametrize(
    ("pod", "ending"),
    [
        pytest.param(facts(ends=ended(0)), Ending.COMPLETED, id="exit status 0"),
        pytest.param(facts(ends=ended(1)), Ending.FAILED, id="exit status 1"),
        pytest.param(facts(ends=ended(137, "OOMKilled")), Ending.OOM_KILLED, id="out of memory"),
        pytest.param(
            facts(ends=ended(143), disrupted=True, deleting=True), Ending.EVICTED, id="evicted"
        ),
        pytest.param(
            facts(ends=ended(143), deleting=True), Ending.COMPLETED, id="replaced by its controller"
        ),
        pytest.param(
            facts(ends=ended(1, finished_s=NOW_S - 2 * HOUR_S)), None, id="end of an earlier run"
        ),
        pytest.param(facts(), None, id="the pod runs, the agent does not measure"),
    ],
)
def test_the_end_of_a_run_that_no_report_shows_is_recognised(
    pod: PodFacts, ending: Ending | None
) -> None:
    tracker = begun()
    found = followed(tracker, report(), {"u1": pod}, now_s=NOW_S + 60)
    assert [each.life.ending for each in found] == ([] if ending is None else [ending])
    assert len(tracker.running) == (ending is None)


@pytest.mark.parametrize(
    ("pod", "ending"),
    [
        (facts(), Ending.COMPLETED),
        (facts(disrupted=True), Ending.EVICTED),
        (facts(ends=ended(2)), Ending.FAILED),
    ],
)
def test_the_end_of_a_deleted_pod_is_recognised(pod: PodFacts, ending: Ending) -> None:
    tracker = begun()
    (found,) = followed(tracker, report(), {}, {"u1": pod})
    assert (found.life.ending, found.life.peak_bytes) == (ending, 8 * GIB)
    assert tracker.running == []
    assert followed(tracker, report(), {}) == []


def test_a_restart_ends_a_run_and_begins_another() -> None:
    tracker = begun()
    pod = facts(ends=ended(1, finished_s=NOW_S - 30))
    (found,) = followed(tracker, report(use(3, NOW_S - 20)), {"u1": pod})
    assert (found.life.ending, found.life.peak_bytes) == (Ending.FAILED, 8 * GIB)
    (running,) = tracker.running
    assert (running.life.peak_bytes, running.life.started_s) == (3 * GIB, NOW_S - 20)


def test_a_restart_after_an_unknown_end_is_censored() -> None:
    (found,) = followed(begun(), report(use(3, NOW_S - 20)), {"u1": facts()})
    assert found.life.ending is Ending.UNKNOWN
    assert found.life.censored


def test_a_peak_never_falls_and_time_without_a_report_does_not_count() -> None:
    tracker = begun()
    followed(tracker, report(use(5)), {"u1": facts()}, now_s=NOW_S + 100)
    followed(tracker, report(), {"u1": facts()}, now_s=NOW_S + 9 * HOUR_S)
    (running,) = tracker.running
    assert (running.life.peak_bytes, running.life.until_s) == (8 * GIB, NOW_S + 100)


@pytest.mark.parametrize(
    "unusable",
    [
        use(8, uid="unknown"),
        use(0),
        use(8, 0.0),
    ],
)
def test_use_without_a_pod_a_peak_or_a_start_is_not_a_run(unusable: Any) -> None:
    assert begun(unusable).running == []


@pytest.mark.parametrize(
    ("amount", "requested_gib"),
    [(Bytes(12 * GIB), 12), (Share(250_000), 23 / 4), (ReplicaShare(), 0), (None, 0)],
)
def test_a_run_has_the_request_of_its_author(amount: Amount | None, requested_gib: float) -> None:
    pod = facts(requests={} if amount is None else {"main": amount})
    tracker = LifeTracker()
    for peak_gib in (3, 4):  # The second report keeps the request.
        tracker.follow({NODE: report(use(peak_gib))}, {"u1": pod}, {}, NOW_S)
    (running,) = tracker.running
    assert running.life.requested_bytes == requested_gib * GIB


def test_the_startup_peak_counts_once_it_has_settled() -> None:
    early = begun(use(8, startup_peak_bytes=7 * GIB)).running[0].life
    assert early.startup_peak_bytes is None
    settled = use(8, startup_peak_bytes=8 * GIB, settled_at="2027-01-15T07:30:00Z")
    assert begun(settled).running[0].life.flat
    assert begun(use(8, peak_partial=True)).running[0].life.censored


def test_a_startup_peak_is_kept_if_a_restarted_agent_lacks_it() -> None:
    settled = use(8, startup_peak_bytes=8 * GIB, settled_at="2027-01-15T07:30:00Z")
    tracker = begun(settled)
    assert followed(tracker, report(use(8)), {"u1": facts()}, now_s=NOW_S + 5) == []
    assert tracker.running[0].life.startup_peak_bytes == 8 * GIB


def test_a_pod_that_ended_before_it_was_followed_leaves_no_run() -> None:
    tracker = LifeTracker()
    assert followed(tracker, report(use(8)), {}, {"u1": facts()}) == []
    assert tracker.running == []


def test_a_report_counts_only_for_pods_of_its_node() -> None:
    tracker = LifeTracker()
    pods = {"u1": facts(), "u2": facts(node="")}
    lie = report(use(23), use(23, uid="u2"))
    assert followed(tracker, lie, pods, node="another") == []
    assert tracker.running == []
    tracker.follow({"n1": report(use(8)), "another": lie}, pods, {}, NOW_S)
    (running,) = tracker.running
    assert running.life.peak_bytes == 8 * GIB
    # This report neither ends nor restarts the run, and does not count for a deleted pod.
    restarted = report(use(1, NOW_S))
    assert tracker.follow({"n1": report(use(8)), "another": restarted}, pods, {}, NOW_S) == []
    (ended,) = tracker.follow({"another": lie}, {}, {"u1": facts()}, NOW_S)
    assert ended.life.peak_bytes == 8 * GIB


def test_no_peak_is_larger_than_its_device() -> None:
    tracker = begun(use(4096, startup_peak_bytes=4096 * GIB, settled_at=stamp(NOW_S)))
    (running,) = tracker.running
    assert (running.life.peak_bytes, running.life.startup_peak_bytes) == (23 * GIB, 23 * GIB)


@pytest.mark.parametrize("device", ["GPU-of-no-report", ""])
def test_a_row_with_an_unknown_device_is_ignored(device: str) -> None:
    assert begun(use(8, device=device)).running == []


def test_an_ended_run_is_not_counted_again_if_a_report_shows_it_again() -> None:
    tracker, over = begun(), {"u1": facts(ends=ended(0))}
    assert len(followed(tracker, report(), over)) == 1
    assert followed(tracker, report(use(8)), over) == []
    assert followed(tracker, report(), over) == []
    assert [*followed(tracker, report(use(8, NOW_S + 5)), {"u1": facts()}), *tracker.running] != []


def test_a_report_that_alternates_between_two_starts_ends_one_run() -> None:
    tracker, pods = begun(), {"u1": facts()}
    ends = [
        life.life.started_s
        for started_s in (NOW_S, NOW_S - HOUR_S) * 3
        for life in followed(tracker, report(use(8, started_s)), pods)
    ]
    assert ends == [NOW_S - HOUR_S]
    assert [each.life.started_s for each in tracker.running] == [NOW_S]


@pytest.mark.parametrize(
    ("peaks_gib", "unsettled"),
    [
        pytest.param((8, 8.2, 8.4, 8.6), True, id="a leak"),
        pytest.param((8, 8, 10, 10), True, id="another model in the process"),
        pytest.param((8, 8.2, 8.2, 8.2), False, id="settled on the second day"),
    ],
)
def test_a_run_that_grows_after_its_first_day_is_unsettled(
    peaks_gib: tuple[float, ...], unsettled: bool
) -> None:
    tracker = begun(use(4))
    for day, peak_gib in enumerate(peaks_gib):
        followed(tracker, report(use(peak_gib)), {"u1": facts()}, now_s=NOW_S + day * DAY_S)
    (life,) = (each.life for each in tracker.running)
    assert (life.unsettled, life.censored) == (unsettled, unsettled)
    assert life.first_day_bytes == int(peaks_gib[1] * GIB)
    (gone,) = followed(tracker, report(), {}, {"u1": facts()}, now_s=NOW_S + 4 * DAY_S)
    assert (gone.life.ending, gone.life.unsettled) == (Ending.COMPLETED, unsettled)
