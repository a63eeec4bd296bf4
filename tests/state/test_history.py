"""Checks that the history keeps each value until it changes, for an hour, and within a memory
limit.
"""

import random
from array import array

import pytest

from headroom.console.history.history import (
    BLOCK_ROWS,
    KEPT_S,
    RESOLUTION_S,
    UNKNOWN,
    Block,
    History,
    Layout,
    PodOn,
    pack,
)

POD = PodOn(0, "uid-a", "team", "a", 8 << 30)
ONE = Layout(("GPU-0",), (POD,))
NONE = Layout(("GPU-0",))


def read(history: History, node: str = "n", step: int = 0) -> list[tuple[int, list[int]]]:
    return [
        (at, row)
        for _, steps, values in history.since(node, step)
        for at, row in zip(steps.tolist(), values.tolist(), strict=True)
    ]


def test_equal_rows_are_stored_once() -> None:
    history = History()
    for step, used in enumerate([5, 5, 5, 9, 9], 100):
        history.add("n", step, NONE, [1, used, UNKNOWN])
    assert read(history) == [(100, [1, 5, UNKNOWN]), (103, [1, 9, UNKNOWN])]


def test_the_newest_report_of_each_step_is_kept() -> None:
    history = History()
    history.add("n", 100, NONE, [1, 2, 3])
    history.add("n", 100, NONE, [4, 5, 6])
    assert read(history) == [(100, [4, 5, 6])]


def test_blocks_return_the_rows_that_were_put_into_them() -> None:
    draw = random.Random(3)
    for count in (1, 2, BLOCK_ROWS):
        steps = sorted(draw.sample(range(100, 10_000), count))
        rows = [[draw.randrange(1 << 16) for _ in range(ONE.width)] for _ in steps]
        words = array("H", [value for row in rows for value in row]).tobytes()
        read_steps, values = pack(ONE, steps, words).rows()
        assert (read_steps.tolist(), values.tolist()) == (steps, rows)


def test_a_damaged_block_raises_an_error() -> None:
    block = pack(ONE, [1], bytes(2 * ONE.width))
    with pytest.raises(ValueError, match="cannot be decompressed"):
        Block(ONE, 1, 1, b"no block").rows()
    with pytest.raises(ValueError, match="does not have 3 columns"):
        Block(NONE, 1, 1, block.packed[:0] + pack(ONE, [1], bytes(8)).packed).rows()


def test_a_new_block_begins_when_a_pod_is_added_or_removed() -> None:
    history = History()
    history.add("n", 1, NONE, [0, 0, 0])
    history.add("n", 2, ONE, [9, 7, 0, 7])
    history.add("n", 3, NONE, [0, 0, 0])
    assert [(layout.pods, steps[0]) for layout, steps, _ in history.since("n", 0)] == [
        ((), 1),
        ((POD,), 2),
        ((), 3),
    ]


def test_rows_of_the_last_hour_and_the_value_at_its_start_are_kept() -> None:
    history = History()
    for step in range(1, 1000):
        history.add("n", step, NONE, [0, step, 0])
    history.add("still", 1, NONE, [0, 42, 0])
    history.forget(1000)
    first = 1000 - KEPT_S // RESOLUTION_S
    assert history.first_step == first == 640
    (begin, _), *_, (end, _) = read(history, step=first)
    assert (begin, end) == (640, 999)
    assert len(history.since("n", 0)) == 7  # Six full steps, and the step in which the hour begins.
    assert read(history, "still", first) == [(1, [0, 42, 0])]


def test_the_history_becomes_shorter_if_it_exceeds_its_memory_limit() -> None:
    draw = random.Random(1)
    history = History(max_bytes=6_000)
    for step in range(1, 361):
        history.add("n", step, ONE, [draw.randrange(60_000) for _ in range(4)])
        history.add("m", step, ONE, [draw.randrange(60_000) for _ in range(4)])
        if step % 30 == 0:
            history.forget(step)
            assert history.size_bytes <= 6_000
    assert history.first_step > 0
    assert read(history)[-1][0] == 360


def test_the_history_of_a_deleted_node_is_dropped_after_an_hour() -> None:
    history = History()
    history.add("n", 1, NONE, [1, 2, 3])
    history.add("n", 2, Layout(), ())
    history.forget(300)
    assert history.nodes() == ["n"]
    history.forget(400)
    assert history.nodes() == []
