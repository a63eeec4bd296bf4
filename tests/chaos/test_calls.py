"""Tests the check of kube-scheduler's calls during faults of consoles and webhooks."""

from typing import Any

import pytest

from tests.chaos.calls import Call, noticed, unexpected

REASON = "insufficient GPU memory on any device"
ASKED = {"PodNamespace": "chaos", "PodName": "p", "PodUID": "uid-p", "Node": "n"}


def call(verb: str = "bind", error: str = "", **other: Any) -> Call:
    given = {"ended": True, "asked": ASKED}
    return Call(**{"verb": verb, "answer": {"Error": error}, **given, **other})


REFUSING = call("filter", answer={"FailedAndUnresolvableNodes": {"n": REASON}})
USUAL = [REFUSING, *(call() for _ in range(100))]


def rules(*during: Call) -> set[str]:
    states = ["does not exist"]
    found = noticed(USUAL, [*USUAL, *during], lambda uid: states if uid == "uid-p" else [])
    return {finding.rule for finding in found}


@pytest.mark.parametrize(
    "right",
    [
        call(error=REASON),
        call(error="pod chaos/p does not exist"),
        call("filter", error="no node has enough free GPU memory; many pods wait"),
        call(
            error="pod chaos/p is not bound: the API server took longer than kube-scheduler waits"
        ),
        call(error="gave up after 5 attempts: GPUNode n was written by another client"),
        call(ended=False, answer=None),
        call("prioritize", answer=[]),
    ],
)
def test_errors_with_another_cause_are_expected(right: Call) -> None:
    assert rules(right) == set()


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ([call(error="internal error in Headroom")], "error"),
        ([call(error="pod chaos/p is bound to node m")], "error"),
        ([call(error="pod chaos/p does not exist", asked={**ASKED, "PodUID": "u"})], "error"),
        ([call("filter", error=REASON)], "error"),
        ([call("filter", error="gave up after 5 attempts")], "error"),
        ([call(answer=None)], "unanswered"),
    ],
)
def test_an_error_without_another_cause_is_a_finding(wrong: list[Call], rule: str) -> None:
    assert rule in rules(*wrong)


def test_exceptions_in_logs_are_findings() -> None:
    lines = (
        '{"event": "filtered", "level": "info"}',
        '{"event": "view_failed", "path": "/v1/pods", "exception": "Traceback: TypeError"}',
        "[1]",
        '{"event": "cut o',
    )
    (finding,) = unexpected("console-a", "\n".join(lines))
    assert str(finding) == "exception: console-a: view_failed: Traceback: TypeError"
