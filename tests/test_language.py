"""Checks that the wording lint detects its patterns, and that the product has no findings."""

import subprocess
from pathlib import Path

import pytest

from tests import language
from tests.controlplane import ROOT, built


def test_the_product_has_no_findings() -> None:
    assert [str(each) for each in language.product_findings()] == []


@pytest.mark.parametrize(
    ("source", "rules"),
    [
        ('"""Return the memory of a device."""\n', []),
        ('"""What a device has."""\n', ["starts with a pronoun"]),
        ('"""Return what was promised."""\n', ["write reserve, reservation"]),
        ("x = 1  # nobody waits\n", ["write no pod, a client, any process"]),
        ("#: Where it is.\nx = 1\n", ["starts with a pronoun"]),
        ('raise ValueError("the pod was refused by us")\n', ["write reject, unschedulable"]),
        ('name = "refused"\n', []),
        ("x = 1  # the node has room\n", ["write fit, enough free memory"]),
    ],
)
def test_docstrings_comments_and_messages_are_checked(
    source: str, rules: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language, "ROOT", tmp_path)
    file = tmp_path / "module.py"
    file.write_text(source)
    assert [each.rule for each in language.findings(file)] == rules


def test_whole_manifests_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "ROOT", tmp_path)
    file = tmp_path / "rules.yaml"
    file.write_text("# Alerts.\nsummary: what was promised\n")
    (found,) = language.findings(file)
    assert str(found) == "rules.yaml:2: write reserve, reservation: promised"


@pytest.mark.slow
def test_docs_are_checked_by_the_same_table_of_words(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# What pods need\n\nMemory is promised. Code is not checked: `promised`.\n")
    found = subprocess.run(
        [built("vale")["vale"], "--config", ROOT / ".vale.ini", "--output", "line", page],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1
    assert [line.partition(str(page))[2] for line in found.stdout.splitlines()] == [
        ":1:3:Headroom.Headings:Name the subject: do not begin a heading with 'What'.",
        ":3:11:Headroom.Words:Write 'reserve, reservation' instead of 'promised'.",
    ]
