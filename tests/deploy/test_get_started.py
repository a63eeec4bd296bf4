"""Checks that a test executes every command block of docs/get-started."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.controlplane import ROOT
from tests.deploy.pages import Block, blocks, matches

#: The page and the mark of each part that no test can execute, with the reason.
NOT_HERE: Mapping[tuple[str, str], str] = {
    (
        "local-cluster.md",
        "packages",
    ): "installs packages; `make newcomer` starts with exactly these",
    ("images.md", "digest"): "asks Docker's registry",
    ("images.md", "push"): "pushes to a registry of the reader's",
    ("helm.md", "plugin"): "downloads packages; `make newcomer` executes it",
    ("gitops.md", "push"): "pushes to a registry of the reader's",
    ("platforms.md", "gke"): "needs a project of Google's cloud, and its command line",
}
PAGES = sorted(path.name for path in (ROOT / "docs/get-started").glob("*.md"))
#: Modules whose calls do not count: this module, and a module that `make test` does not run.
LEFT_OUT = (Path(__file__).name, "newcomer.py")
#: Functions of tests.deploy.pages whose arguments are a page and a mark.
PLAYERS = ("play", "commands")


def shells(page: str) -> list[Block]:
    found = blocks(f"get-started/{page}")
    return [block for block in found if block.language in ("sh", "console")]


def played(tests: Path) -> set[tuple[str, str]]:
    """Return the page and the mark of each part that a test module executes."""
    found = set()
    for module in tests.rglob("*.py"):
        text = module.read_text(encoding="utf-8")
        if "get-started/" not in text or module.name in LEFT_OUT:
            continue
        for call in ast.walk(ast.parse(text)):
            match call:
                case ast.Call(
                    func=ast.Name(name),
                    args=[ast.Constant(str(page)), ast.Constant(str(mark)), *_],
                ) if name in PLAYERS:
                    found.add((page.removeprefix("get-started/"), mark))
    return found


def test_every_command_block_is_executed_or_listed_with_a_reason() -> None:
    executed = played(ROOT / "tests")
    neither = [
        (page, block.mark, block.text.splitlines()[0])
        for page in PAGES
        for block in shells(page)
        if (page, block.mark) not in executed | NOT_HERE.keys()
    ]
    assert neither == []
    assert executed & NOT_HERE.keys() == set()


def test_every_listed_part_is_on_its_page() -> None:
    there = {(page, block.mark) for page in PAGES for block in shells(page)}
    assert NOT_HERE.keys() <= there


@pytest.mark.parametrize("page", PAGES)
def test_the_parts_of_a_page_are_found(page: str) -> None:
    text = (ROOT / "docs/get-started" / page).read_text(encoding="utf-8")
    assert re.search(r"^You need ", text, re.MULTILINE)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[-1] == "If it does not work"
    numbers = [int(found) for found in re.findall(r"^## (\d+)\. ", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_outputs_may_differ_only_in_names_ages_restarts_and_widths() -> None:
    shown = "NAME       READY   AGE\na-6f9d8c7b5-4tq8n   1/1     52s\n"
    assert matches("NAME      READY  AGE\na-7d8f9b6c45-x2zp9  1/1    3m1s\n", shown)
    assert not matches("NAME      READY  AGE\na-7d8f9b6c45-x2zp9  0/1    3m1s\n", shown)
    assert matches("a 1/1 Running 2 (66s ago) 3m1s\n", "a   1/1   Running   0   52s\n")
    assert not matches("a 1/1 Pending 2 (66s ago) 3m1s\n", "a   1/1   Running   0   52s\n")
    assert matches("gpu-a   24.0 GiB  ok\n", "gpu-2  24.0 GiB  ok\n")
    assert not matches("gpu-a   23.0 GiB  ok\n", "gpu-2  24.0 GiB  ok\n")
    assert matches("a\nb\nc\n", "a\n...\nc\n")
    assert matches("a\nc\n", "a\n...\nc\n")
    assert matches("a\n", "a\n...\n")
    assert not matches("a\nd\n", "a\n...\nc\n")
    assert not matches("ab\n", "a\n...\n")
    assert matches("node gpu-2 is full\n", "node ... is full\n")
