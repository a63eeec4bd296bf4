"""Tests how all clients read errors and watches of the API server."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.client.kube_protocol import (
    LineTooLong,
    retry_after_s,
    status_message,
    status_of,
    whole_lines,
)


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_lines_of_a_watch_do_not_depend_on_its_chunks(text: bytes, cuts: list[int]) -> None:
    text += b"\n"
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[begin:end] for begin, end in itertools.pairwise(edges)]
    found = [line for lines in whole_lines(chunks, 1 << 20) for line in lines]
    assert found == text[:-1].split(b"\n")


def test_a_truncated_or_endless_line_of_a_watch_is_an_error() -> None:
    assert list(whole_lines([b"a\nb\n"], 4)) == [[b"a", b"b"]]
    with pytest.raises(EOFError, match="ended inside a line"):
        list(whole_lines([b"a\nb"], 4))
    with pytest.raises(LineTooLong):
        list(whole_lines([b"abc", b"de"], 4))


@pytest.mark.parametrize(
    ("body", "message", "cause"),
    [
        (b'{"message": "no", "reason": "Forbidden"}', "Forbidden: no", ""),
        (b'{"message": "no", "details": {"causes": [{"message": "a budget"}]}}', "no", "a budget"),
        (b'{"message": "no", "details": {"causes": []}}', "no", ""),
        (b"<html>busy</html>\n", "<html>busy</html>", ""),
        (b'["message"]', '["message"]', ""),
        (b"\xff", "\N{REPLACEMENT CHARACTER}", ""),
        (b"x" * 2000, "x" * 1000, ""),
    ],
)
def test_the_message_is_read_from_an_error_response(body: bytes, message: str, cause: str) -> None:
    assert (status_message(body), status_of(body).cause) == (message, cause)


def test_only_whole_seconds_are_a_retry_after() -> None:
    assert retry_after_s({"Retry-After": "3"}) == 3.0
    assert retry_after_s({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}) == 0.0
    assert retry_after_s({}) == 0.0
