"""Checks that retries of pods that were rejected together are spread. The test simulates
kube-scheduler's queue.
"""

import heapq
import json
import random
from collections import Counter
from typing import Any

import pytest

from extender.scheduler.retry_spreading import RetrySpreader
from tests.builders import DISTRIBUTED
from tests.scheduler.test_needless_evictions import Full
from tests.serving import offer, pod

TRY_AGAIN = (
    "no node has enough free GPU memory; many pods wait, so this one is retried within seconds"
)

FEW = 5
REJECTED_OFTEN = 3

TRY_S = 0.008
MOST_BACK_OFF_S = 30.0


class Queue:
    """Simulates the queue of kube-scheduler 1.36 without SchedulerPopFromBackoffQ
    (pkg/scheduler/backend/queue), while pods change continuously. Once a second, all pods whose
    back-off has ended are tried.
    """

    def __init__(self, pods: int, pace: RetrySpreader | None) -> None:
        self._pace = pace
        self._due = [(0.0, f"pod-{number}") for number in range(pods)]
        self._rejected, self._errors = Counter[str](), Counter[str]()
        #: Pods that were tried in each second.
        self.tried: dict[int, list[str]] = {}
        self.errors = 0

    def play(self, seconds: int) -> None:
        """Continue the simulation for ``seconds``."""
        begun = len(self.tried)
        now_s = float(begun)
        for second in range(begun, begun + seconds):
            now_s = max(now_s, float(second))
            self.tried[second] = []
            while self._due and self._due[0][0] <= second:
                _, pod = heapq.heappop(self._due)
                self.tried[second].append(pod)
                heapq.heappush(self._due, (now_s + self._try(pod, now_s), pod))
                now_s += TRY_S

    def _try(self, pod: str, now_s: float) -> float:
        """Try the pod. Return its back-off in seconds."""
        if self._pace is None or self._pace.reject(pod, now_s):
            self._rejected[pod] += 1
            self._errors[pod] = 0
            times = self._rejected[pod]
        else:
            self.errors += 1
            self._errors[pod] += 1
            times = self._errors[pod]
        return float(min(2 ** (times - 1), MOST_BACK_OFF_S))

    def most(self, since: int) -> int:
        return max(len(pods) for second, pods in self.tried.items() if second >= since)


@pytest.mark.parametrize("pods", [60, 200, 500])
def test_pods_that_are_rejected_together_are_spread_and_stay_spread(pods: int) -> None:
    together, apart = Queue(pods, None), Queue(pods, RetrySpreader())
    together.play(500)
    apart.play(500)
    share = pods / (MOST_BACK_OFF_S + 1)
    assert together.most(since=300) > 4 * share
    assert apart.most(since=300) <= max(1.5 * share, FEW + 1)
    # Each pod is still tried.
    tried = Counter(pod for second in range(430, 500) for pod in apart.tried[second])
    assert len(tried) == pods
    assert min(tried.values()) >= 2
    # The spreading costs each pod a few more tries, but only once.
    assert apart.errors < 6 * pods
    errors = apart.errors
    apart.play(100)
    assert apart.errors - errors < pods / 2


def test_a_few_pods_get_the_reason_with_each_rejection() -> None:
    few = Queue(FEW, RetrySpreader())
    few.play(200)
    assert few.errors == 0


def test_the_first_rejections_have_the_reason_even_if_many_pods_wait() -> None:
    pace, now_s = RetrySpreader(), 0.0
    for turn in range(REJECTED_OFTEN):
        assert all(pace.reject(f"pod-{number}", now_s + number * TRY_S) for number in range(300))
        now_s += 5.0 * (turn + 1)
    assert not all(pace.reject(f"pod-{number}", now_s + number * TRY_S) for number in range(300))


@pytest.mark.parametrize(("pause_s", "all_rejected"), [(39.0, False), (41.0, True)])
def test_rejections_are_remembered_for_40_s(pause_s: float, all_rejected: bool) -> None:
    spreader, now_s = RetrySpreader(), 0.0
    for turn in range(REJECTED_OFTEN):
        now_s = 5.0 * turn
        assert all(spreader.reject(f"pod-{number}", now_s) for number in range(60))
    answers = [spreader.reject(f"pod-{number}", now_s + pause_s) for number in range(60)]
    assert all(answers) is all_rejected


def test_a_scheduler_without_back_off_gets_the_reason_with_each_rejection() -> None:
    """Otherwise, autoscalers would rarely see that the pod is unschedulable."""
    pace, dice = RetrySpreader(), random.Random(7)
    for turn in range(2000):
        assert pace.reject(f"pod-{dice.randrange(20)}", 0.01 * turn)


def test_filter_answers_many_pods_with_errors_and_preemptors_with_the_reason() -> None:
    world = Full({"full": [[]]}, DISTRIBUTED)
    calls = world.verbs(telemetry=world.telemetry)
    crowd = [pod(f"p{number}", "90Gi") for number in range(60)]
    crowd[-1]["status"]["nominatedNodeName"] = "full"

    def asked(shown: dict[str, Any]) -> str:
        """Call filter. Return the Error, or an empty string if the pod is rejected on each node."""
        answer = json.loads(calls.filter(json.dumps(offer(shown, "full")).encode()))
        assert not answer["NodeNames"]
        assert bool(answer["Error"]) is not bool(answer["FailedAndUnresolvableNodes"])
        return str(answer["Error"])

    for _ in range(REJECTED_OFTEN):
        assert {asked(each) for each in crowd} == {""}
        world.now_s += 20.0
    message = [asked(each) for each in crowd]
    assert message[:FEW] == [""] * FEW
    assert message[-10:-1] == [TRY_AGAIN] * 9
    assert message[-1] == ""
    assert world.sample("headroom_retries_spread_total") == message.count(TRY_AGAIN)
    # The journal records that no node could take the pod.
    decision = world.journal.of_uid("uid-p58")
    assert decision is not None
    assert (decision.fits, decision.offered) == (0, 1)
    assert asked(pod("new", "90Gi")) == ""
