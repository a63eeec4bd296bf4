"""Checks which configurations share a row of the report, and which is the best."""

import math
from dataclasses import replace

import pytest

from headroom.planner.decision import choices, decision
from headroom.planner.intervals import GROWTH, Reach
from headroom.planner.report import shown_rows
from headroom.planner.rhythm import Variation
from headroom.planner.scenarios import Configuration
from headroom.planner.sentences import sentences
from headroom.planner.study import Figures, Row, Study, best_row
from headroom.planner.wording import runs
from headroom.planner.workload import GIB, History, Life, Machine, Vram

PEAKS = Vram("peaks", 0.1)
MACHINE = Machine("a", "L4", 4, 22 * GIB)
LIFE = Life("web-1", "web", 0.0, 60.0, 1, None, 5 * GIB)


def row(mode: str, replicas: int, gpus: int, lost: int = 0, vram: Vram = PEAKS) -> Row:
    figures = Figures(
        gpus=gpus,
        nodes=1,
        models={"L4": gpus},
        wait_s=0.0,
        today_wait_s=0.0,
        memory_ratio=0.5,
        sm_ratio=0.0,
        out_of_memory=lost,
        today_out_of_memory=0,
    )
    return Row(Configuration(mode, replicas, vram), [figures], Variation(None, "no range"))


def study(*rows: Row) -> Study:
    history = History((MACHINE,), (LIFE,), ())
    return Study(history, PEAKS, 1, row("exclusive", 1, 8), list(rows), [])


def test_equal_rows_collapse_and_rows_that_lose_pods_come_last() -> None:
    requests = Vram("requests")
    found = shown_rows(
        study(
            row("counting", 2, 4),
            row("counting", 3, 3, lost=8),
            row("counting", 4, 3, lost=8),
            row("counting", 5, 2, lost=9),
            *(row("predicted", each, 4) for each in (2, 3, 4, 6)),
            row("steered", 2, 4),
            *(row("steered", each, 3) for each in (3, 4)),
            row("steered", 3, 3, vram=requests),
        ),
        None,
    )
    assert [(each.name, each.cells[0], each.cells[-1]) for each in found] == [
        ("unshared", "8", "0"),
        ("2 replicas, counted only", "4", "0"),
        ("2 to 4 and 6 replicas, predicted; 2 replicas, steered", "4", "0"),
        ("3 and 4 replicas, steered", "3", "0"),
        ("3 replicas, steered, vram from requests", "3", "0"),
        ("3 and 4 replicas, counted only", "3", "8"),
        ("5 replicas, counted only", "2", "9"),
    ]


def test_both_modes_of_headroom_share_a_name() -> None:
    rows = [row(mode, each, 4) for mode in ("predicted", "steered") for each in range(2, 9)]
    _, shared = shown_rows(study(*rows), None)
    assert shared.name == "2 to 8 replicas, predicted or steered"


def test_a_configuration_that_loses_pods_is_not_the_best() -> None:
    dense, safe = row("steered", 8, 2, lost=5), row("predicted", 2, 6)
    assert best_row([dense, safe]) is safe
    assert best_row([dense]) is dense  # All others are missing.
    (_, _, _, shared, *_) = sentences(study(dense), None)
    assert shared.endswith(", and 5 pods that use more than they request run out of memory.")
    (_, _, _, shared, *_) = sentences(study(row("steered", 8, 2, lost=1)), None)
    assert shared.endswith(", and 1 pod that uses more than it requests runs out of memory.")


def test_numbers_are_written_as_ranges() -> None:
    assert [runs(each) for each in ([2], [2, 3], [2, 3, 4], [2, 4, 5, 6, 8])] == [
        *("2", "2 and 3", "2 to 4", "2, 4 to 6 and 8")
    ]


@pytest.mark.parametrize(
    ("today", "text", "keep"),
    [
        (
            14,
            "The history needed 8 GPUs unshared, and another such period should need 6 to 12 in 9 "
            "of 10 cases: keep at least 12, 2 fewer than today's 14.",
            12,
        ),
        (12, "keep all of today's 12.", 12),
        (10, "keep all of today's 10, which can be too few.", 10),
        (4, "plan for 12, because today's 4 are probably too few.", 12),
    ],
)
def test_the_decision_keeps_no_fewer_gpus_than_the_range_supports(
    today: int, text: str, keep: int
) -> None:
    machine = replace(MACHINE, gpus=today)
    range_6_to_12 = Variation(Reach(math.log(8 / 6), math.log(12 / 8 / (1 + GROWTH))))
    unshared = replace(row("exclusive", 1, 8), variation=range_6_to_12)
    dense = row("predicted", 4, 4)
    given = Study(History((machine,), (LIFE,), ()), PEAKS, 1, unshared, [dense], [])
    (sentence,) = decision(given)
    assert f"{text} The history needed 4 GPUs shared, so keep at least 4;" in sentence
    assert [each.keep_gpus for each in choices(given)] == [keep, 4]


def test_the_decision_does_not_count_on_sharing_that_saves_nothing_or_loses_pods() -> None:
    (sentence,) = decision(study(row("predicted", 4, 8)))
    assert "GPUs shared" not in sentence
    assert sentence.endswith("because of sharing: in at least one replay, it saves no GPU.")
    (sentence,) = decision(study(row("predicted", 4, 2, lost=1)))
    assert sentence.endswith("in at least one replay, pods run out of memory.")


def test_counting_that_loses_no_pod_is_not_explained_by_a_cause_of_loss() -> None:
    def counted(gpus: int, lost: int = 0) -> str:
        found = sentences(study(row("predicted", 4, 4), row("counting", 4, gpus, lost)), None)
        (text,) = [each for each in found if "without Headroom" in each]
        return text

    start = "With the same 4 replicas but without Headroom, "
    end = (
        " Pods of another period can run out of memory, because kube-scheduler counts only "
        "replicas."
    )
    none = f"{start}no pod would have run out of memory, and the work needs "
    assert counted(4) == f"{none}4 GPUs, too: all of the saving comes from sharing alone.{end}"
    assert counted(3) == f"{none}3 GPUs.{end}"
    assert counted(3, lost=2) == (
        f"{start}2 pods (up to 200.0 % of all) would have run out of memory, because "
        "kube-scheduler counts only replicas."
    )


def test_mig_that_slows_no_pod_down_is_not_explained_by_a_cause_of_slowness() -> None:
    mig = row("mig", 1, 4)
    mig = replace(mig, configuration=replace(mig.configuration, profile="1g"))

    def text(sm_ratio: float | None) -> str:
        given = study(row("predicted", 4, 4), mig)
        lives = (replace(LIFE, sm_ratio=sm_ratio),)
        found = sentences(replace(given, history=replace(given.history, lives=lives)), None)
        (text,) = [each for each in found if "MIG" in each]
        return text

    start = (
        "With all shared GPUs split into MIG instances 1g, which keep pods apart, it needs 4 GPUs"
    )
    assert text(0.1) == f"{start}, and pods lose less than 1 % of their running time."
    assert text(None) == f"{start}."
