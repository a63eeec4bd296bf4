"""Tests that pods that start alone start one after another."""

from itertools import permutations
from typing import Any

import msgspec
import pytest

from agent.gate_decision import Verdict
from headroom.contract.gpunode import ADOPTED, Reservation
from tests.agent.gate_node import DEVICES, ask, reservation, row, status

WAITS = Verdict("not yet", "another pod that starts alone is starting on the same device")


def starting(
    second: int,
    *candidates: str,
    phase: Any = "starting",
    count: int = 1,
    adopted: bool = False,
) -> Reservation:
    made = reservation(10, *candidates, count=count)
    since = f"2026-11-21T00:00:{second:02}.000+00:00"
    flags = [ADOPTED] * adopted
    return msgspec.structs.replace(made, since=since, phase=phase, start_timeout_s=600, flags=flags)


def test_pods_that_start_alone_start_in_the_order_of_the_ledger() -> None:
    both = status(row("p", "GPU-a"), row("q", "GPU-a"))
    reservations = {"p": starting(1), "q": starting(2)}
    assert ask(reservations, both, "p") == Verdict("yes")
    assert ask(reservations, both, "q") == WAITS
    reservations["p"] = starting(1, phase="running")
    assert ask(reservations, both, "q") == Verdict("yes")
    same_time = {"p": starting(1), "q": starting(1)}
    assert [ask(same_time, both, uid).answer for uid in "pq"] == ["yes", "not yet"]


def test_only_pods_on_the_same_device_start_one_after_the_other() -> None:
    apart = status(row("p", "GPU-a"), row("q", "GPU-b"))
    reservations = {"p": starting(1), "q": starting(2)}
    assert [ask(reservations, apart, uid).answer for uid in "pq"] == ["yes", "yes"]
    ordinary = {"p": starting(1), "q": starting(2, phase="")}
    both = status(row("p", "GPU-a"), row("q", "GPU-a"))
    assert [ask(ordinary, both, uid).answer for uid in "pq"] == ["yes", "yes"]


def test_a_pod_waits_for_an_earlier_pod_that_may_get_its_device() -> None:
    """The later pod was admitted first, but the earlier pod can still get either GPU."""
    reservations = {"p": starting(1), "q": starting(2)}
    assert ask(reservations, status(row("q", "GPU-a")), "q") == WAITS
    assert ask({"p": starting(3), "q": starting(2)}, status(row("q", "GPU-a")), "q").answer == "yes"


def test_a_pod_waits_for_a_later_pod_bound_by_another_scheduler() -> None:
    """The later pod does not wait for the earlier pod, because it has no gate."""
    reservations = {"p": starting(1), "q": starting(2, adopted=True)}
    beside = status(row("p", "GPU-a"), row("q", "GPU-a"))
    assert ask(reservations, beside, "p") == WAITS
    assert ask(reservations, beside, "q") == Verdict("yes")
    before_admission = status(row("p", "GPU-a"))
    assert ask(reservations, before_admission, "p") == WAITS
    apart = status(row("p", "GPU-a"), row("q", "GPU-b"))
    assert ask(reservations, apart, "p") == Verdict("yes")
    reservations["q"] = starting(2, adopted=True, phase="running")
    assert ask(reservations, beside, "p") == Verdict("yes")


def test_a_pod_waits_for_a_later_pod_that_has_begun() -> None:
    """After the GPUNode was lost, the reservations were written again in another order."""
    reservations = {"p": starting(1), "q": starting(2)}
    begun = row("q", "GPU-a", started_at="2026-11-21T00:00:00Z")
    assert ask(reservations, status(row("p", "GPU-a"), begun), "p") == WAITS
    assert ask(reservations, status(row("p", "GPU-a"), row("q", "GPU-a", used=1)), "p") == WAITS
    assert ask(reservations, status(row("p", "GPU-b"), begun), "p").answer == "yes"


@pytest.mark.parametrize("adopted", ["", "p", "q", "qr", "pqr"])
@pytest.mark.parametrize("order", [*permutations("pqr")])
def test_pods_with_several_devices_do_not_deadlock(order: tuple[str, ...], adopted: str) -> None:
    """p holds both GPUs, and q and r hold one GPU each. All pods start in any order, but no two
    pods start on one GPU at the same time.
    """
    on = {"p": DEVICES, "q": DEVICES[:1], "r": DEVICES[1:]}
    ledger = {
        uid: starting(n, count=len(on[uid]), adopted=uid in adopted) for n, uid in enumerate(order)
    }
    order = tuple(sorted(order, key=lambda uid: uid not in adopted))
    begun: list[str] = []
    while waiting := [uid for uid in order if ledger[uid].phase == "starting"]:
        at = {uid: "2026-11-21T00:00:00Z" if uid in begun else "" for uid in order}
        sample = status(*(row(u, uuid, replica=u, started_at=at[u]) for u in on for uuid in on[u]))
        begun += [u for u in waiting if u not in begun and ask(ledger, sample, u).answer == "yes"]
        assert begun[:1] == waiting[:1]
        taken = [uuid for uid in begun for uuid in on[uid]]
        assert len(taken) == len({*taken})
        settled = begun.pop(0)
        ledger[settled] = msgspec.structs.replace(ledger[settled], phase="running")
