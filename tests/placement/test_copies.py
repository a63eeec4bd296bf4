"""A copy that anybody has never changes; one that nobody has any more is used again."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from extender.placement.copies import Copies

ROWS = 300


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["write", "write", "write", "keep", "keep a part", "forget", "grow"]),
            st.integers(0, ROWS - 1),
        ),
        max_size=40,
    )
)
def test_what_is_held_stays_and_what_is_new_is_as_it_is(steps: list[tuple[str, int]]) -> None:
    now = np.zeros((2 * ROWS, 2), np.int64, order="F")
    rows, copies = ROWS, Copies()
    held: list[tuple[NDArray[np.int64], list[list[int]]]] = []
    for number, (verb, row) in enumerate(steps, 1):
        if verb == "write":
            now[row] = number
            copies.wrote(row)
        elif verb == "keep":
            held.append((copies.newest(now[:rows]), now[:rows].tolist()))
        elif verb == "keep a part":  # a view alone keeps what it looks at
            held.append((copies.newest(now[:rows])[row:], now[row:rows].tolist()))
        elif verb == "forget":
            del held[:1]
        else:
            rows += 1
        assert copies.newest(now[:rows]).tolist() == now[:rows].tolist()
    for array, was in held:
        assert array.tolist() == was
        assert not array.flags.writeable


def test_a_row_costs_no_copy_of_all_once_nobody_has_the_last() -> None:
    now, copies = np.zeros((ROWS, 2), np.int64), Copies()
    first = copies.newest(now).ctypes.data
    now[7] = 1
    copies.wrote(7)
    assert copies.newest(now).ctypes.data == first
    kept = copies.newest(now)
    now[8] = 1
    copies.wrote(8)
    assert copies.newest(now).ctypes.data != kept.ctypes.data
