"""Names read as bytes are those that any JSON reader finds, and mean the rows that a dict has."""

import json
import random
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extender.placement.snapshot import NodeTerms
from extender.placement.table import Table, build
from extender.web.names import Names, NodeIndex
from extender.web.wire import MalformedBody, decode_offer

POD = '{"metadata":{"name":"p","uid":"u"}}'
#: Alike in front, behind, and but for what fills up a word; and what JSON escapes.
CLOSE = ["gpu-a100-0001", "gpu-a100-0002", "hpu-a100-0001", "a", "a\0", "a" * 8, "a" * 9, "", "0",
         "gpu-a100-0001-and-so-on", '","', '"', "\\", "é", "\x7f", "]", '["', "a,b"]  # fmt: skip
NAMES = st.lists(st.sampled_from(CLOSE) | st.text(max_size=20)) | st.integers(0, 4).flatmap(
    lambda length: st.lists(st.text('ab,]["', min_size=length, max_size=length))
)
SPELLINGS: list[dict[str, Any]] = [
    {"separators": (",", ":")},
    {"separators": (",", ":"), "ensure_ascii": False},
    {},
    {"indent": 1},
]


def node(name: str) -> NodeTerms:
    return NodeTerms(name, None, 0.0)


def offered(json_names: str) -> Names:
    body = f'{{"Pod":{POD},"Nodes":null,"NodeNames":{json_names}}}'
    return decode_offer(body.encode(errors="surrogatepass")).names


def texts(names: Names) -> list[str]:
    return names.texts(np.arange(len(names)))


@pytest.mark.parametrize("spelling", SPELLINGS, ids=["Go", "UTF-8", "spaces", "lines"])
@given(names=NAMES)
@example(names=["abc", "", ""])  # quotes where those of two names of three letters would be
def test_names_are_read_whatever_their_spelling(names: list[str], spelling: dict[str, Any]) -> None:
    read = offered(json.dumps(names, **spelling))
    assert texts(read) == names
    assert len(read) == len(names)
    assert read.json == msgspec.json.encode(names)


@pytest.mark.parametrize(
    "value",
    ["7", '"a"', '{"a":"b"}', '["a",1]', '[1,"a"]', '["a",["b"]]', '[["a"],["b"]]', '["a",null]',
     '["a"',  '["a" "b"]', '["a";"b"]', '["a",]', '["a\udcff"]', '["a","b\x01"]', "[[]]",
     '["a",["x"],"b"]', '["a",1,"b"]', '["a",null,"b"]'],
)  # fmt: skip
def test_what_is_no_list_of_names_is_refused(value: str) -> None:
    with pytest.raises(MalformedBody, match=r"(NodeNames|not JSON)"):
        offered(value)


@given(NAMES, st.data())
def test_chosen_names_are_a_list_again(names: list[str], data: st.DataObject) -> None:
    size = len(names)
    chosen = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    kept = Names.of(names).only(np.array(chosen, bool))
    assert texts(kept) == [name for name, keep in zip(names, chosen, strict=True) if keep]
    assert kept.json == msgspec.json.encode(texts(kept))


@given(NAMES, NAMES)
@example(["a"], ["a\0", "a"])
def test_rows_are_those_of_a_dict(known: list[str], asked: list[str]) -> None:
    snap = build(map(node, known))
    rows = NodeIndex(snap).rows(Names.of(asked))
    assert rows.tolist() == [snap.row_of.get(name, -1) for name in asked]


@pytest.mark.parametrize("others", [[], ["a"], ["a", "b" * 300]])
def test_names_longer_than_any_of_a_node_cost_no_memory(others: list[str]) -> None:
    """A table of names of 50,000 bytes would take 2 GiB."""
    long = ["x" * 50_000, "x" * 50_000 + "y"]
    index = NodeIndex(build([node(name) for name in [*long, *others]]))
    asked = ["a", "x" * 50_000 + "y", "x" * 50_000, "x" * 8, "x" * 264, "", "b" * 300, "b" * 299]
    known = {name: row for row, name in enumerate([*long, *others])}
    tracemalloc.start()
    try:
        rows = index.rows(offered(json.dumps(asked)))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rows.tolist() == [known.get(name, -1) for name in asked]
    assert peak_bytes < 16 << 20


def test_names_that_meet_in_the_table_are_all_found() -> None:
    names = [f"gpu-a100-{i:04d}" for i in range(3_000)]
    snap = build(map(node, names))
    asked = random.Random(1).sample([*names, "gpu-a100-9999", "gpu-a100-1"], len(names) + 2)
    rows = NodeIndex(snap).rows(offered(json.dumps(asked, separators=(",", ":"))))
    assert rows.tolist() == [snap.row_of.get(name, -1) for name in asked]


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(CLOSE))))
def test_an_index_serves_as_long_as_the_rows_are_the_same(steps: list[tuple[bool, str]]) -> None:
    table = Table()
    index = NodeIndex(table.snapshot())
    for here, name in steps:
        if here:
            table.put(node(name))
        else:
            table.drop(name)
        snap = table.snapshot()
        if not index.serves(snap):
            index = NodeIndex(snap)
        assert index.rows(Names.of(CLOSE)).tolist() == snap.rows(CLOSE).tolist()
