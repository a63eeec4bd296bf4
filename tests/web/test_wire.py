"""What goes over the wire can be read back, whatever the names."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from contract.kube import ObjectMeta, Pod
from extender.web.names import Names
from extender.web.wire import Offered, encode_filter, encode_priorities, printable

NAMES = st.lists(
    st.text() | st.sampled_from(['","', '",', ',"', '"', "\\", 'a","Score":9},{"Host":"b', "é\x00"])
)


@given(NAMES, st.data())
def test_every_host_gets_its_score(names: list[str], data: st.DataObject) -> None:
    size = len(names)
    scores = data.draw(st.lists(st.integers(0, 10), min_size=size, max_size=size))
    answer = json.loads(encode_priorities(Names.of(names), np.array(scores, np.int64)))
    sent = sorted(zip(names, scores, strict=True))
    assert sorted((one["Host"], one["Score"]) for one in answer) == sent
    assert all(set(one) == {"Host", "Score"} for one in answer)


@given(NAMES, st.data())
def test_every_node_passes_or_has_its_sentence(names: list[str], data: st.DataObject) -> None:
    names = list(dict.fromkeys(names))
    size = len(names)
    sentences = ["", "no room", 'a "word"']
    codes = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    offered = Offered(Pod(metadata=ObjectMeta()), Names.of(names), None)
    array = np.array(codes, np.int8)
    passed = offered.names.only(array == 0)
    answer = json.loads(encode_filter(offered, passed, array, sentences))
    pairs = list(zip(names, codes, strict=True))
    assert answer["NodeNames"] == [name for name, code in pairs if not code]
    assert answer["FailedAndUnresolvableNodes"] == {n: sentences[code] for n, code in pairs if code}
    assert (answer["Nodes"], answer["FailedNodes"], answer["Error"]) == (None, {}, "")


@given(st.text())
def test_no_text_holds_what_kube_scheduler_would_format(text: str) -> None:
    assert "%" not in printable(text)
    assert len(printable(text)) <= 1000
