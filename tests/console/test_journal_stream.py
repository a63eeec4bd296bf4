"""Checks that a follower of a journal receives the same decisions as the extender has recorded."""

from collections.abc import Mapping

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason
from headroom.core.cluster.holds import HeldFor, Why
from headroom.core.journal.decision_records import (
    Bounds,
    Candidates,
    Filtered,
    Preempted,
    Ranked,
    Record,
    Victim,
)
from headroom.core.journal.journal import Decision, Journal, NodeSets
from headroom.runtime.follow.journal_stream import (
    BadLine,
    Copy,
    Cursor,
    DecisionLine,
    HoldsLine,
    NodesLine,
    StateLine,
    encode,
)
from tests.builders import pod, reservation
from tests.examples import examples

MAX_HOLDS = 1_000
MAX_NODE_SETS = 4


AT_S = 1_795_219_200.0
KINDS = (Filtered, Ranked, Candidates, Preempted)


@given(st.permutations(range(11)), st.integers(0, 11), st.integers(0, 2))
def test_the_names_of_the_offered_nodes_are_kept(
    order: list[int], known: int, unknown: int
) -> None:
    row_of = {f"n{row}": row for row in range(11)}
    rows = np.array([*order[:known], *[-1] * unknown], np.int64)
    expected = [f"n{row}" for row in sorted(order[:known])]
    assert NodeSets().offered(row_of, rows).names() == expected


def decision(
    journal: Journal,
    shown: Pod,
    row_of: Mapping[str, int],
    rows: list[int],
    sets: NodeSets,
    at_s: float = AT_S,
) -> None:
    metadata = shown.metadata
    named = sets.offered(row_of, np.array(rows, np.int64))
    which = f"{metadata.uid}.{metadata.resource_version}"
    rejected = {Reason.STALE_REPORT: 2}
    journal.record(Decision(shown, which, at_s, 7, 5, 2, rejected, offered_nodes=named))


def read(copy: Copy, cursor: Cursor) -> list[bytes]:
    """Apply all lines to the copy. Return the lines about decisions."""
    lines = list(cursor.lines())
    for line in lines:
        copy.take(encode(line))
    return [encode(line) for line in lines if not isinstance(line, HoldsLine)]


def message(record: Record) -> tuple[object, ...]:
    parts = tuple((record.part(kind), record.times(kind)) for kind in KINDS)  # type: ignore[type-var]
    return record.decision_id, record.at_s, record.first_at_s, record.node, parts


def content(journal: Journal) -> list[tuple[object, ...]]:
    return [message(record) for record in journal.records.newest_first()]


def test_a_reader_gets_the_pod_the_counts_and_the_offered_nodes_in_parts() -> None:
    journal, sets = Journal(), NodeSets()
    rows = {"gpu-a": 0, "gpu-b": 1, "gpu-c": 2}
    decision(journal, pod("8Gi"), rows, [0, 2], sets)
    journal.note(pod("8Gi"), Ranked(AT_S, 4, 7, 2, "gpu-a"), AT_S, "gpu-a")
    victim = Victim("default", "v", "uid-v", 3, True)
    journal.note(pod("8Gi"), Preempted(AT_S, 1, 2, 1, "gpu-a", (victim,)), AT_S)
    copy, cursor = Copy(Journal()), Cursor(journal)
    assert len(read(copy, cursor)) == 2  # names of the nodes, and the decision
    assert content(copy.journal) == content(journal)
    kept = copy.journal.of_uid("uid-p")
    assert kept is not None
    assert kept.pod == pod("8Gi")
    assert kept.rejected == {Reason.STALE_REPORT: 2}
    assert kept.offered_nodes is not None
    assert kept.offered_nodes.names() == ["gpu-a", "gpu-c"]
    assert copy.journal.of_pod("default", "p") == kept
    assert list(cursor.lines()) == []


def test_a_changed_decision_is_sent_again_without_its_pod_and_counted_once() -> None:
    journal, sets = Journal(), NodeSets()
    copy, cursor = Copy(Journal()), Cursor(journal)
    decision(journal, pod("8Gi"), {"gpu-a": 0}, [0], sets)
    read(copy, cursor)
    journal.note(pod("8Gi"), Ranked(AT_S, 4, 7, 2, "gpu-a"), AT_S, "gpu-a")
    (line,) = read(copy, cursor)
    assert msgspec.json.decode(line)["shown"] is None
    decision(journal, pod("8Gi"), {"gpu-a": 0}, [0], sets)
    read(copy, cursor)
    assert content(copy.journal) == content(journal)
    (record,) = copy.journal.records.newest_first()
    assert (record.times(Filtered), record.node) == (2, "gpu-a")


def test_a_reconnected_reader_continues_after_the_last_decision_that_it_read() -> None:
    journal, sets = Journal(), NodeSets()
    copy = Copy(Journal())
    decision(journal, pod("8Gi", uid="uid-1"), {"gpu-a": 0}, [0], sets)
    read(copy, Cursor(journal))
    decision(journal, pod("8Gi", uid="uid-2"), {"gpu-a": 0}, [0], sets)
    lines = read(copy, Cursor(journal, copy.version))
    assert [msgspec.json.decode(line)["type"] for line in lines] == ["nodes", "decision"]
    assert content(copy.journal) == content(journal)


def test_names_of_nodes_are_sent_when_they_change_and_only_the_last_sets_are_kept() -> None:
    journal, sets = Journal(), NodeSets()
    copy, cursor = Copy(Journal()), Cursor(journal)
    numbers = []
    for number in range(MAX_NODE_SETS + 3):
        decision(journal, pod("8Gi", uid=f"uid-{number}"), {f"gpu-{number}": 0}, [0], sets)
        lines = [msgspec.json.decode(line) for line in read(copy, cursor)]
        numbers += [line["number"] for line in lines if line["type"] == "nodes"]
    assert numbers == list(range(1, MAX_NODE_SETS + 4))
    last = copy.journal.of_uid(f"uid-{MAX_NODE_SETS + 2}")
    assert last is not None
    assert last.offered_nodes is not None
    assert last.offered_nodes.names() == [f"gpu-{MAX_NODE_SETS + 2}"]
    first = copy.journal.of_uid("uid-0")
    assert first is not None
    assert first.offered_nodes is not None
    assert first.offered_nodes.names() is None


def test_holds_are_sent_to_each_new_reader_and_again_when_they_change() -> None:
    now = HoldsLine()
    cursor = Cursor(Journal(), holds=lambda: now)
    copy = Copy(Journal())
    assert copy.holds is None
    assert list(cursor.lines()) == [now]
    assert list(cursor.lines()) == []
    bind = HeldFor("uid-p", "gpu-a", Why.ASSUMED, reservation({"GPU-0": 1}))
    now = HoldsLine((bind, HeldFor("uid-q", "gpu-b", Why.NOMINATED)))
    (line,) = cursor.lines()
    copy.take(encode(line))
    assert copy.holds == now
    now = HoldsLine()
    (line,) = cursor.lines()
    copy.take(encode(line))
    assert copy.holds == HoldsLine()
    assert list(Cursor(Journal(), holds=lambda: now).lines()) == [now]


def test_the_state_contains_the_name_of_the_extender_and_the_schedulers_that_call_it() -> None:
    copy = Copy(Journal())
    state = StateLine("r1", "1.2.3", AT_S, 9, "", "enforce", ("headroom", "other"))
    copy.take(encode(state))
    assert copy.state == state
    assert copy.journal.schedulers == ["headroom", "other"]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b'{"type":"later-version"}',
        b'{"type":"decision"}',
        b"[" * 100_000,
        encode(DecisionLine("u.1", "d", "p", AT_S, AT_S, "", 1, times=(1,))),
        encode(HoldsLine((HeldFor("u", "gpu-a", Why.NOMINATED),) * (MAX_HOLDS + 1))),
    ],
)
def test_an_invalid_line_is_an_error_and_changes_nothing(line: bytes) -> None:
    copy = Copy(Journal())
    with pytest.raises(BadLine):
        copy.take(line)
    assert content(copy.journal) == []
    assert copy.holds is None


def test_a_decision_that_refers_to_unknown_nodes_is_dropped() -> None:
    journal, sets = Journal(), NodeSets()
    decision(journal, pod("8Gi"), {"gpu-a": 0}, [0], sets)
    copy = Copy(Journal())
    for line in Cursor(journal).lines():
        if not isinstance(line, NodesLine):
            copy.take(encode(line))
    kept = copy.journal.of_uid("uid-p")
    assert kept is not None
    assert kept.offered_nodes is None


@pytest.mark.parametrize("max_shown_bytes", [None, 5000])  # a pod has 2021 bytes
@settings(max_examples=examples(250), deadline=None)
@example(
    [
        *((2, "filter"), (2, "rank"), (3, "filter"), (3, "read"), (0, "filter"), (2, "rank")),
        (0, "filter"),
    ]
)
@example(
    [
        *((0, "filter"), (2, "filter"), (4, "filter"), (0, "rank"), (0, "read")),
        *((1, "filter"), (2, "rank"), (3, "filter")),
    ]
)
@example(
    [
        *((1, "filter"), (3, "filter"), (0, "filter"), (0, "read"), (1, "rank")),
        *((2, "filter"), (4, "filter"), (1, "rank")),
    ]
)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["filter", "rank", "preempt", "read"])),
        max_size=40,
    )
)
def test_the_copy_equals_the_journal_whenever_it_is_read(
    max_shown_bytes: int | None, steps: list[tuple[int, str]]
) -> None:
    bounds = Bounds(decisions=4)
    journal, sets = Journal(bounds, max_shown_bytes), NodeSets()
    copy, cursor = Copy(Journal(bounds, max_shown_bytes)), Cursor(journal)
    for number, (which, step) in enumerate(steps):
        about, at_s = pod("8Gi", uid=f"uid-{which}"), AT_S + number
        match step:
            case "filter":
                decision(journal, about, {"gpu-a": 0}, [0], sets, at_s)
            case "rank":
                journal.note(about, Ranked(at_s, 4, 7, 2, "gpu-a"), at_s, "gpu-a")
            case "preempt":
                journal.note(about, Preempted(at_s, 1, 2, 1), at_s)
            case "read":
                read(copy, cursor)
    read(copy, cursor)
    assert content(copy.journal) == content(journal)
    assert copy.journal.records.size_bytes == journal.records.size_bytes
    for which in range(6):
        ours, theirs = journal.of_uid(f"uid-{which}"), copy.journal.of_uid(f"uid-{which}")
        if ours is not None and journal.records.of_id(ours.decision_id) is not None:
            assert theirs is not None
            assert (theirs.pod, theirs.at_s) == (ours.pod, ours.at_s)
