"""Tests where the docs show their pictures, and how the drawings are computed."""

import re
import subprocess

import pytest

from benchmarks.pictures import FILES, architecture, device_choice
from tests.builders import GIB
from tests.controlplane import ROOT

IMAGES = ROOT / "docs/images"
BASE = ROOT / "deploy/base"


def listed(*patterns: str) -> list[str]:
    command = ["git", "ls-files", *patterns]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return shown.stdout.split()


def test_every_picture_is_made_by_the_script_and_shown_with_a_description() -> None:
    assert sorted(path.name for path in IMAGES.iterdir()) == sorted(FILES)
    shown = set()
    for page in listed("*.md"):
        for described, name in re.findall(
            r"!\[([^]]*)\]\([^)]*images/([^)]+)\)", (ROOT / page).read_text()
        ):
            assert len(described.split()) >= 5, f"{page}: describe {name}"
            shown.add(name)
    assert shown == set(FILES)


def test_names_and_ports_in_the_architecture_match_the_manifests() -> None:
    assert sorted(architecture.of_manifests(BASE), key=lambda each: each.name) == sorted(
        architecture.WORKLOADS, key=lambda each: each.name
    )
    called = list(architecture.extenders(BASE))
    assert {address for address, _ in called} == {architecture.EXTENDER_URL}
    assert sorted(call for _, calls in called for call in calls) == sorted(architecture.CALLS)


@pytest.mark.parametrize(
    ("name", "drawing"), [("architecture", architecture), ("device-choice", device_choice)]
)
def test_drawings_are_up_to_date(name: str, drawing: object) -> None:
    written = (IMAGES / f"{name}.svg").read_text()
    assert written == drawing.draw(), "run: make pictures"  # type: ignore[attr-defined]


def test_the_example_of_the_device_choice_is_computed() -> None:
    found = device_choice.outcome()
    assert found.free_bytes == (int(15.5 * GIB), int(7.5 * GIB))
    assert (found.plugins, found.steered) == (1, 0)
    assert found.missing_bytes == 4.5 * GIB
    text = device_choice.draw()
    for words in ("5 of 8 are free", "free on GPU 0 only", "4.5 GiB are missing", "3.5 GiB stay"):
        assert words in text
