"""Tests the suggestions of a plan: which workloads to annotate with which request, and which stay
exclusive.
"""

import random
from dataclasses import replace

import pytest

from headroom.contract.annotations import Bytes, parse_vram
from headroom.planner.next_steps import advice, namespace_defaults
from headroom.planner.scenarios import Configuration, split
from headroom.planner.workload import History, Life, Machine, Vram, largest_bytes, with_workloads

GIB, MIB = 1 << 30, 1 << 20
L40S = Machine("a", "L40S", 4, 46_068 * MIB)
T4 = Machine("b", "T4", 2, 15_109 * MIB)
PEAKS = Vram("peaks", 0.1)


def life(workload: str, number: int, peak_gib: float | None, **more: object) -> Life:
    peak_bytes = None if peak_gib is None else int(peak_gib * GIB)
    plain = Life(f"{workload}-{number}", workload, number * 60.0, 600.0, 1, None, peak_bytes)
    return replace(plain, **more)  # type: ignore[arg-type]


def history(*lives: Life) -> History:
    ordered = tuple(sorted(lives, key=lambda each: each.created_s))
    return with_workloads(History((L40S, T4), ordered, ()))


def random_history(seed: int) -> History:
    """Return pods of a few workloads whose peaks, requests, GPUs and models differ."""
    lots = random.Random(seed)
    lives: list[Life] = []
    for number in range(lots.randint(1, 6)):
        usual_gib, spread = lots.uniform(0.5, 30), lots.choice((0.0, 0.05, 0.6))
        requests = lots.random() < 0.6
        for at in range(lots.randint(1, 12)):
            peak_gib = min(44.9, usual_gib * lots.lognormvariate(0, spread))
            lives.append(
                life(
                    f"team-{number % 2}/w{number}",
                    at,
                    None if lots.random() < 0.15 else peak_gib,
                    gpus=2 if lots.random() < 0.03 else 1,
                    request_bytes=int(lots.uniform(0.5, 40) * GIB) if requests else None,
                    models=frozenset(lots.choice(((), (), ("L40S",), ("L40S", "T4")))),
                )
            )
    return history(*lives)


@pytest.mark.parametrize("source", ["peaks", "requests", "recommendations"])
def test_a_printed_request_below_a_peak_is_marked(source: str) -> None:
    annotated = 0
    for seed in range(400):
        given, vram = random_history(seed), Vram(source, 0.1 if source == "peaks" else 0.0)
        share, stay = advice(given, vram)
        names = {each.workload for each in given.lives}
        # Each workload is listed once.
        named = [each.workload for each in share] + [each.workload for each in stay]
        assert sorted(named) == sorted(names), seed
        peaks: dict[str, list[int]] = {name: [] for name in names}
        for each in given.lives:
            peaks[each.workload] += [] if each.peak_bytes is None else [each.peak_bytes]
        for found in share:
            annotated += 1
            value = found.annotation.partition(": ")[2]
            if source == "recommendations":
                assert value == "auto,default=100%"
                continue
            amount = parse_vram(value).everywhere
            assert isinstance(amount, Bytes)
            above = [peak for peak in peaks[found.workload] if peak > amount.count_bytes]
            assert found.above == len(above), seed
            if above:
                assert source == "requests"
                text = f"{len(above)} of {found.pods} pod"
                assert text in found.remark
                assert f"up to {max(above) / GIB:.1f} GiB" in found.remark
        defaults, without = namespace_defaults(share, stay)
        for namespace, default in defaults:
            amount = parse_vram(default.partition(": ")[2]).everywhere
            assert isinstance(amount, Bytes)
            for name in names:
                if name.startswith(f"{namespace}/"):
                    assert name in {each.workload for each in share}, seed
                    assert max(peaks[name], default=0) <= amount.count_bytes
        assert not {name for name, _ in defaults} & {name for name, _ in without}
    assert annotated > 200


@pytest.mark.parametrize("source", ["peaks", "requests"])
def test_the_replay_uses_the_printed_requests(source: str) -> None:
    vram = Vram(source, 0.1 if source == "peaks" else 0.0)
    for seed in range(100):
        given = random_history(seed)
        share, stay = advice(given, vram)
        exclusive, shared = split(given.lives, given.machines, Configuration("steered", 4, vram))
        amounts = {each.workload: each.need_bytes for each in share}
        for each in shared:
            if amounts:
                assert vram.need_bytes(each) == amounts[each.workload]
        assert not {each.workload for each in exclusive} & set(amounts)
        if share or stay:
            assert {each.workload for each in exclusive} <= {each.workload for each in stay}


def test_workloads_with_one_pod_each_are_named_too() -> None:
    given = history(life("ml/web", 0, 8), life("ml/chat", 0, 40))
    share, stay = advice(given, PEAKS)
    assert [each.workload for each in share] == ["ml/web"]
    assert [each.workload for each in stay] == ["ml/chat"]
    # Without names of workloads, the names of pods are no advice.
    lives = (replace(each, workload=each.name) for each in given.lives)
    assert advice(history(*lives), PEAKS) == ([], [])


def test_a_workload_with_some_large_pods_stays_exclusive_as_a_whole() -> None:
    lives = [life("ml/sweep", at, 30 if at < 49 else 43.6) for at in range(67)]
    share, (stay,) = advice(history(*lives), PEAKS)
    assert share == []
    # With the margin it would need 48 GiB, more than the GPU has.
    assert stay.reason == "18 of 67 pods need more than 80 %, up to 45.0 GiB"


def test_pods_without_a_measured_peak_get_the_request_of_their_workload() -> None:
    lives = [life("ml/web", at, None if at % 5 == 0 else 8) for at in range(10)]
    given = history(*lives)
    (found,), stay = advice(given, PEAKS)
    assert stay == []
    assert found.annotation == "headroom.gpu/vram: 9Gi"
    assert found.remark.endswith("; 2 of 10 pods were not measured")
    assert [each.known_bytes for each in given.lives] == [8 * GIB] * 10
    assert {PEAKS.need_bytes(each) for each in given.lives} == {9 * GIB}


def test_a_namespace_with_an_exclusive_workload_gets_no_default() -> None:
    lives = [life("ml/web", at, 8) for at in range(3)] + [
        life("ml/chat", at, 40) for at in range(3)
    ]
    share, stay = advice(history(*lives), PEAKS)
    assert [each.workload for each in share] == ["ml/web"]
    assert [(each.workload, each.reason) for each in stay] == [("ml/chat", "needs 44.0 GiB")]
    assert namespace_defaults(share, stay) == ([], [("ml", "ml/chat")])


def test_models_that_only_some_pods_may_use_do_not_count_as_large() -> None:
    lives = [life("ml/web", at, 13, models=frozenset({"T4", "L40S"})) for at in range(3)]
    lives.append(life("ml/web", 3, 13, models=frozenset({"T4"})))
    share, (stay,) = advice(history(*lives), PEAKS)
    assert (share, stay.reason) == ([], "needs 14.5 GiB")
    assert largest_bytes((T4,))["T4"] < 14.8 * GIB


def test_requests_by_pod_need_at_most_as_many_gpus_as_requests_by_workload() -> None:
    given = history(*(life("ml/web", at, 4 + at) for at in range(5)))
    own = Vram("pod-peaks", 0.1)
    pairs = [(own.need_bytes(each), PEAKS.need_bytes(each)) for each in given.lives]
    assert all(one is not None and other is not None and one <= other for one, other in pairs)
    assert pairs[-1][0] == pairs[-1][1]
