"""What goes over the wire can be read back, whatever the names."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.kube import ObjectMeta, Pod
from extender.web.names import Names
from extender.web.wire import Offered, encode_alike, encode_filter, encode_priorities, printable

NAMES = st.lists(
    st.text() | st.sampled_from(['","', '",', ',"', '"', "\\", 'a","Score":9},{"Host":"b', "é\x00"])
)


@given(st.text())
def test_the_winner_alone_has_a_score(name: str) -> None:
    assert json.loads(encode_priorities(name)) == [{"Host": name, "Score": 10}]
    assert json.loads(encode_priorities(None)) == []


@given(NAMES, st.data())
def test_several_have_one_score_unless_they_are_all(names: list[str], data: st.DataObject) -> None:
    size = len(names)
    chosen = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    told = [{"Host": n, "Score": 10} for n, is_one in zip(names, chosen, strict=True) if is_one]
    found = json.loads(encode_alike(Names.of(names), np.array(chosen, bool)))
    assert found == ([] if all(chosen) else told)


@given(NAMES, st.data())
def test_every_node_passes_or_has_its_sentence(names: list[str], data: st.DataObject) -> None:
    names = list(dict.fromkeys(names))
    size = len(names)
    sentences = ["", "no room", 'a "word"']
    codes = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    offered = Offered(Pod(metadata=ObjectMeta()), Names.of(names), None)
    array = np.array(codes, np.int8)
    kept = array == 0
    answer = json.loads(encode_filter(offered, offered.names.only(kept), kept, array, sentences))
    pairs = list(zip(names, codes, strict=True))
    assert answer["NodeNames"] == [name for name, code in pairs if not code]
    assert answer["FailedAndUnresolvableNodes"] == {n: sentences[code] for n, code in pairs if code}
    assert (answer["Nodes"], answer["FailedNodes"], answer["Error"]) == (None, {}, "")


@pytest.mark.parametrize("length", [1, 7, 8, 13, 31])
@pytest.mark.parametrize("unlike", [False, True], ids=["equally long", "one longer"])
def test_many_names_come_back_as_they_came(length: int, unlike: bool) -> None:
    """Of many, what is written is not put together name by name."""
    names = [f"{i:0{length}x}"[-length:] for i in range(1, 2001)]
    names += ["x" * (length + 1)] * unlike
    read = Names.plain(json.dumps(names, separators=(",", ":")).encode())
    assert read is not None
    codes = np.arange(len(names)) % 3
    offered = Offered(Pod(metadata=ObjectMeta()), read, None)
    passed = read.only(codes == 0)
    answer = json.loads(
        encode_filter(offered, passed, codes == 0, codes.astype(np.int8), ["", "no", "none"]),
        object_pairs_hook=list,
    )
    found = dict(answer)
    kept = [name for name, code in zip(names, codes, strict=True) if not code]
    assert found["NodeNames"] == kept
    told = [(name, "no") for name, code in zip(names, codes, strict=True) if code == 1]
    told += [(name, "none") for name, code in zip(names, codes, strict=True) if code == 2]
    assert found["FailedAndUnresolvableNodes"] == told
    again = Names.plain(passed.json)
    assert again is not None
    assert passed.words(4).tolist() == again.words(4).tolist() == Names.of(kept).words(4).tolist()
    none = read.only(np.zeros(len(names), bool))
    assert (none.json, none.words(2).shape) == (b"[]", (2, 0))


@given(st.text())
def test_no_text_holds_what_kube_scheduler_would_format(text: str) -> None:
    assert "%" not in printable(text)
    assert len(printable(text)) <= 1000
