"""docs/reference/metrics.md lists the reasons of all Events that the sources can write."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from extender.controllers.eviction import DOES_NOT_FIT
from extender.controllers.preemption import NEWCOMER, VICTIM
from tests.monitoring.documented import DOCS

SOURCES = Path(__file__).parents[2] / "extender"


def reasons() -> Iterator[str]:
    yield from (DOES_NOT_FIT, NEWCOMER, VICTIM)
    for file in SOURCES.rglob("*.py"):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if "otice(" in text else ():
            match node:
                case ast.Call(
                    ast.Name("Notice" | "pod_notice"), [_, ast.Constant(str(reason)), *_]
                ):
                    yield reason


def test_the_docs_list_every_reason_and_no_other() -> None:
    rows = re.findall(r"^\| `([A-Z]\w+)` \| (?:pod|node) \|", DOCS.read_text(), re.MULTILINE)
    assert len(set(rows)) == len(rows)
    assert set(rows) == set(reasons())
