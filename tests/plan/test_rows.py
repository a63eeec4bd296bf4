"""Checks which configurations share a row of the report, and which is the best."""

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
    (_, _, shared, *_) = sentences(study(dense), None)
    assert shared.endswith(", and 5 pods that use more than they request run out of memory.")
    (_, _, shared, *_) = sentences(study(row("steered", 8, 2, lost=1)), None)
    assert shared.endswith(", and 1 pod that uses more than it requests runs out of memory.")


def test_numbers_are_written_as_ranges() -> None:
    assert [runs(each) for each in ([2], [2, 3], [2, 3, 4], [2, 4, 5, 6, 8])] == [
        *("2", "2 and 3", "2 to 4", "2, 4 to 6 and 8")
    ]
