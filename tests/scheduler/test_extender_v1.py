"""Checks that calls and encoded responses with any names can be decoded."""

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.scheduler.extender_v1 import (
    MalformedBody,
    Offered,
    decode_offer,
    encode_alike,
    encode_filter,
    encode_priorities,
    go_text,
)
from headroom.contract.kube import ObjectMeta, Pod

NAMES = st.lists(
    st.text() | st.sampled_from(['","', '",', ',"', '"', "\\", 'a","Score":9},{"Host":"b', "é\x00"])
)


#: Text that looks like the end of a pod in the body of a call.
TEXT = st.text() | st.sampled_from(['"NodeNames":[', "]}", '"},"NodeNames":["a"]}', "\\"])


def decoded(body: bytes) -> Offered:
    offered = decode_offer(body)
    offered.decode_names()
    return offered


@given(NAMES, TEXT)
def test_names_may_be_any_field_of_a_call(names: list[str], text: str) -> None:
    sent = {"metadata": {"name": "p", "uid": "u", "annotations": {"headroom.gpu/vram": text}}}
    as_sent = {"Pod": sent, "Nodes": None, "NodeNames": names}
    others = {"NodeNames": names, "Nodes": None, "Pod": sent}, {**as_sent, "New": [text]}
    whole = msgspec.json.encode(names)
    for body in map(msgspec.json.encode, (as_sent, *others)):
        offered = decoded(body)
        assert offered.pod.metadata.annotations == {"headroom.gpu/vram": text}
        assert list(offered.names) == names
        assert offered.may_cover(len(whole))
        assert not offered.may_cover(len(whole) + 1)
        assert all(map(offered.has_name, names))
        assert not offered.has_name("".join(names) + "x")


BODY = b'{"Pod":{"metadata":{"name":"p","uid":"u"}},"Nodes":null,"NodeNames":["a","b"]}'


@pytest.mark.parametrize(
    "body",
    [
        *(pytest.param(BODY[:size], id=f"first {size} bytes") for size in range(len(BODY))),
        BODY.replace(b"}}", b"}"),
        BODY.replace(b'","', b'""'),
        BODY.replace(b'"b"', b"1"),
        BODY.replace(b'"b"', b'["b"]'),
        BODY.replace(b"]}", b"]]"),
        BODY + b"}",
    ],
)
def test_a_malformed_body_is_rejected(body: bytes) -> None:
    assert decoded(BODY).names == ["a", "b"]
    with pytest.raises(MalformedBody):
        decoded(body)


@given(st.text())
def test_only_the_winner_has_a_score(name: str) -> None:
    assert json.loads(encode_priorities(name)) == [{"Host": name, "Score": 10}]
    assert json.loads(encode_priorities(None)) == []


@given(NAMES, st.data())
def test_chosen_nodes_have_equal_scores_unless_all_nodes_are_chosen(
    names: list[str], data: st.DataObject
) -> None:
    size = len(names)
    chosen = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    shown = [{"Host": n, "Score": 10} for n, is_one in zip(names, chosen, strict=True) if is_one]
    found = json.loads(encode_alike(names, np.array(chosen, bool)))
    assert found == ([] if all(chosen) else shown)


@given(NAMES, st.data())
def test_every_node_passes_or_is_rejected_with_a_sentence(
    names: list[str], data: st.DataObject
) -> None:
    names = list(dict.fromkeys(names))
    size = len(names)
    sentences = ["", "no room", 'a "word"']
    codes = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    offered = Offered(Pod(metadata=ObjectMeta()), names=names)
    array = np.array(codes, np.int8)
    answer = json.loads(encode_filter(offered, np.flatnonzero(array == 0), array, sentences))
    pairs = list(zip(names, codes, strict=True))
    assert answer["NodeNames"] == [name for name, code in pairs if not code]
    assert answer["FailedAndUnresolvableNodes"] == {n: sentences[code] for n, code in pairs if code}
    assert (answer["Nodes"], answer["FailedNodes"], answer["Error"]) == (None, {}, "")


@given(st.text())
def test_messages_contain_no_format_verbs_of_go(text: str) -> None:
    assert "%" not in go_text(text)
    assert len(go_text(text)) <= 1000
