"""Checks that pages for users agree on recurring facts, and limits the number of their words."""

import re

import pytest

from reference import facts
from tests.controlplane import ROOT

PAGES = facts.read()
#: The page section that states what ran on real GPUs. Other pages link to it.
REAL_GPUS = "faq.md#is-it-ready-for-production"
#: Maximum number of words of README, by ``wc -w``.
README_WORDS = 900


def test_pages_agree_on_recurring_facts() -> None:
    assert facts.contradictions(PAGES) == []


def test_a_contradiction_and_a_missing_fact_are_reported() -> None:
    (kueue,) = (each for each in facts.FACTS if each.name == "Kueue")
    stated = dict.fromkeys(kueue.pages, "Kueue\n0.19")
    wrong = stated | {"how-to/kueue.md": "tested with Kueue 0.18"}
    of_kueue = [each for each in facts.contradictions(wrong) if ": Kueue" in each]
    assert of_kueue == ["how-to/kueue.md: Kueue: 0.18 instead of 0.19"]
    missing = facts.contradictions({kueue.pages[0]: "", facts.FAQ: ""})
    assert "../README.md: Kueue is missing" in missing


@pytest.mark.parametrize(
    "page", [name for name, text in PAGES.items() if re.search(r"real\s+GPU", text)]
)
def test_pages_that_name_real_gpus_link_to_what_ran_there(page: str) -> None:
    if page == facts.FAQ:
        (section,) = re.findall(r"## Is it ready for production\?\n(.*)", PAGES[page], re.DOTALL)
        named = set(re.findall(r"\b[AHBL]\d{2,3}\b", section))
        assert named == facts.recorded_models()
    else:
        assert REAL_GPUS in PAGES[page]


#: Row of the page -> row of the measurements.
_MEASURED = {
    "`mode: observe`": "replica counting",
    "`predicted`": "predicted",
    "`steered`": "steered",
}


def test_device_choices_show_the_measured_memory() -> None:
    note = (ROOT / "docs/design/device-choice.md").read_text()
    measured = facts.memory_used(note)
    page = PAGES[facts.CHOICE]
    for shown, name in _MEASURED.items():
        (row,) = re.findall(rf"^\| {re.escape(shown)} \|.*\| ([\d.]+) % \|", page, re.MULTILINE)
        assert row == measured[name]


def test_readme_is_short() -> None:
    assert len(PAGES[facts.README].split()) <= README_WORDS


def test_the_first_words_of_readme_state_what_is_installed() -> None:
    first = " ".join(PAGES[facts.README].split()[:100])
    for part in ("agent", "extender", "kube-scheduler", "webhook", "console", "recorder", "CRDs"):
        assert part in first
    assert "build the images" in first


def test_the_list_of_design_notes_is_complete() -> None:
    folder = ROOT / "docs/design"
    listed = re.findall(
        r"^\| \[([\w-]+\.md)\]\(\1\)", (folder / "README.md").read_text(), re.MULTILINE
    )
    assert listed == sorted(page.name for page in folder.glob("*.md") if page.name != "README.md")


def test_the_navigation_shows_no_design_note_but_their_list() -> None:
    navigation = (
        (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\nnot_in_nav:")[0]
    )
    assert re.findall(r"design/\S+", navigation) == ["design/README.md"]
