"""Checks that a dictionary of limited size drops its oldest entries.

tests/soak measures the memory of whole processes.
"""

from headroom.bounded_dict import Bounded


def test_the_oldest_entries_are_evicted() -> None:
    kept = Bounded[str, int](2)
    for key in "abac":
        kept[key] = 1
    assert list(kept) == ["a", "c"]
    kept.trim(1)
    assert list(kept) == ["c"]
