"""The page reads bodies that have the fields which it reads, and knows every kind of node."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from extender.placement import explain
from extender.web import bodies, debug, drift, explained, views

PAGE = (Path(debug.__file__).parent / "page.html").read_text()


@pytest.mark.parametrize(
    ("variable", "bodies", "own"),
    [
        pytest.param("n", (views.NodeView, explained.NearestView), {"text"}, id="nodes"),
        pytest.param("d", (views.DeviceView,), set(), id="devices"),
        pytest.param("h", (views.HolderView,), set(), id="holders"),
        pytest.param("m", (drift.MissView,), set(), id="misses"),
        pytest.param("a", (bodies.AskView,), {"name", "reason"}, id="asks"),  # and nodes
        pytest.param("r", (bodies.ReasonView,), set(), id="reasons"),
        pytest.param("results", (), {"hit", "shifted", "miss"}, id="results"),
    ],
)
def test_every_field_that_it_reads_is_there(
    variable: str, bodies: tuple[type[BaseModel], ...], own: set[str]
) -> None:
    script = PAGE.partition("<script>")[2]
    read = set(re.findall(rf"(?<![\w.]){variable}\.(\w+)", script))
    known = own.union(*(body.model_fields for body in bodies))
    assert read
    assert read - known == set()


def test_it_explains_every_word_for_the_device_of_the_next_pod() -> None:
    block = PAGE.partition("const NEXT = {")[2].partition("};")[0]
    explained = set(re.findall(r'^ *"?([a-z-]+)"?: "', block, re.MULTILINE))
    named = set(re.findall(r"``([a-z-]+)``", explain.certainty.__doc__ or ""))
    assert explained == named
