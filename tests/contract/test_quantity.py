"""Compares our parser of quantities with results of Kubernetes' parser (see
go_quantity/README.md).
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headroom.contract.errors import BadQuantity
from headroom.contract.quantity import format_bytes, gib, parse_bytes, quantity_up_to

MAX_INT64 = (1 << 63) - 1
MAX_LENGTH = 64

TABLE = json.loads((Path(__file__).parent / "quantity_table.json").read_text())
UNITS = ["n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]
REFUSED_BY_US = {"beyond_int64", "no_digits", "too_long"}

counts = st.integers(-MAX_INT64, MAX_INT64)


def read(text: str) -> int | None:
    """Parse the text. Return the bytes, or None if our parser rejects the text."""
    try:
        return parse_bytes(text)
    except BadQuantity:
        return None


def expected(case: dict[str, Any]) -> int | None:
    if case.get("rejected") or case.get("mark") in REFUSED_BY_US:
        return None
    count: int | None = case.get("exact", case.get("value"))
    return count


def test_quantities_are_parsed_as_by_kubernetes() -> None:
    """One test checks all texts, because a separate test for each text would take 2 s of CPU."""
    got = {case["text"]: (read(case["text"]), expected(case)) for case in TABLE}
    assert len(got) == len(TABLE) > 1000
    assert {text: pair for text, pair in got.items() if pair[0] != pair[1]} == {}


def test_the_table_is_complete() -> None:
    """The table must contain every kind of result and every unit, and must mark results that Go
    changes silently.
    """
    marks = [case.get("mark", "rejected" if case.get("rejected") else "same") for case in TABLE]
    assert {*marks} == {"same", "rejected", "negative", *REFUSED_BY_US}
    assert marks.count("same") >= 400
    read_alike = {case["text"] for case in TABLE if "value" in case and "mark" not in case}
    assert {"1" + unit for unit in UNITS} <= read_alike
    assert all(case["exact"] < 0 for case in TABLE if case.get("mark") == "negative")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it has no digits"),
        ("Gi", "it has no digits"),
        ("8 Gi", "it is not a number followed by a unit"),
        ("\u0668Gi", "it is not a number followed by a unit"),
        ("8K", "'K' is not a unit; units are like Mi, Gi, M and G"),
        ("8Ei", "it is too large"),
        ("1e999999999", "it is too large"),
        ("1e-99999999999999999999", "its exponent is too large"),
        ("1" * 1_000_000, f"it is longer than {MAX_LENGTH} characters"),
    ],
    ids=lambda text: text[:30],
)
def test_a_rejection_has_its_reason(text: str, why: str) -> None:
    with pytest.raises(BadQuantity) as caught:
        parse_bytes(text)
    assert caught.value.why == why
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("text", "count"),
    [("1e-999999999", 1), ("1e-2147483649", 1), ("0e999999999", 0), ("0e-999999999", 0)],
)
def test_exponents_on_which_kubernetes_hangs_are_parsed(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@given(st.text() | st.text("0123456789+-.eEinumkKMGTP", max_size=MAX_LENGTH + 1))
def test_only_bad_quantity_is_raised(text: str) -> None:
    count = read(text)
    assert count is None or -MAX_INT64 <= count <= MAX_INT64


@given(counts)
@example(0)
@example(1 << 60)
def test_a_written_quantity_is_parsed_to_the_same_amount(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == count


@given(st.decimals(-(10**20), 10**20, places=12), st.decimals(-(10**20), 10**20, places=12))
def test_a_larger_quantity_is_never_parsed_as_less(one: Any, other: Any) -> None:
    less, more = (read(f"{amount:f}") for amount in sorted((one, other)))
    if less is not None and more is not None:
        assert less <= more


@given(st.integers(-4000, 4000), st.integers(1, 4))
def test_equal_amounts_are_parsed_as_equal(number: int, step: int) -> None:
    kibi, mebi = "KMGTP"[step - 1] + "i", "KMGTP"[step] + "i"
    assert parse_bytes(f"{number}{mebi}") == parse_bytes(f"{number * 1024}{kibi}")
    kilo, mega = "kMGTP"[step - 1], "kMGTP"[step]
    in_thousands = parse_bytes(f"{number * 1000}{kilo}")
    assert parse_bytes(f"{number}{mega}") == in_thousands
    power = 3 * step + 3
    assert parse_bytes(f"{number}e{power}") == parse_bytes(f"{number}E+{power}") == in_thousands


GIB = 1 << 30


@pytest.mark.parametrize(
    ("count", "down", "up"),
    [
        (0, "0.0 GiB", "0.0 GiB"),
        (1, "0.0 GiB", "0.1 GiB"),
        (7 * GIB + GIB // 2, "7.5 GiB", "7.5 GiB"),
        (1440 * GIB, "1,440.0 GiB", "1,440.0 GiB"),
        (100 * GIB - 1, "99.9 GiB", "100.0 GiB"),
        (-(3 * GIB + GIB // 2), "-3.5 GiB", "-3.5 GiB"),
        (-1, "-0.1 GiB", "0.0 GiB"),
    ],
)
def test_amounts_for_people_are_in_gib_with_one_decimal(count: int, down: str, up: str) -> None:
    assert gib(count) == down
    assert gib(count, up=True) == up


@pytest.mark.parametrize(
    ("most", "text"),
    [
        (80 * GIB, "80Gi"),
        (79 * GIB + GIB // 2, "79.5Gi"),
        (80 * GIB - 1, "79.9Gi"),
        (GIB // 10 + 1, "0.1Gi"),
        (GIB // 10, "102Mi"),
        ((1 << 20) - 1, "0Mi"),
        (0, "0Mi"),
    ],
)
def test_a_suggested_amount_is_easy_to_read(most: int, text: str) -> None:
    assert quantity_up_to(most) == text


@given(st.integers(0, 1 << 44))
def test_a_suggested_amount_is_as_large_as_possible(most: int) -> None:
    count = parse_bytes(quantity_up_to(most))
    assert count <= most
    assert most - count <= max(GIB // 10 + 1, 1 << 20)
