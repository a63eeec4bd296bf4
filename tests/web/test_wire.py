"""What goes over the wire can be read back, whatever the names."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from extender.web.wire import encode_priorities, printable

NAMES = st.lists(
    st.text() | st.sampled_from(['","', '"', "\\", 'a","Score":9},{"Host":"b', "é\x00"])
)


@given(NAMES, st.data())
def test_every_host_gets_its_score(names: list[str], data: st.DataObject) -> None:
    size = len(names)
    scores = data.draw(st.lists(st.integers(0, 10), min_size=size, max_size=size))
    answer = json.loads(encode_priorities(names, np.array(scores, np.int64)))
    sent = sorted(zip(names, scores, strict=True))
    assert sorted((one["Host"], one["Score"]) for one in answer) == sent
    assert all(set(one) == {"Host", "Score"} for one in answer)


@given(st.text())
def test_no_text_holds_what_kube_scheduler_would_format(text: str) -> None:
    assert "%" not in printable(text)
    assert len(printable(text)) <= 1000
