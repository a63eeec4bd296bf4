"""Checks that every link in the docs leads to an existing file and heading, and that the site
builds.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.controlplane import ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings on a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def dead_links(page: Path) -> list[str]:
    dead = []
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if "://" in target:
            continue
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            dead.append(target)
    return dead


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert dead_links(page) == []


def test_dead_links_are_reported(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# A `b` page\n```\n# no heading\n```\n")
    page = tmp_path / "a.md"
    page.write_text("[1](b.md#a-b-page) [2](b.md#no-heading) [3](c.md) [4](#none) [5](b.md)")
    assert dead_links(page) == ["b.md#no-heading", "c.md", "#none"]


@pytest.mark.slow
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    repository = "https://example.com/headroom"
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT,
        env=os.environ | {"REPOSITORY": repository, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    written = [page.read_text() for page in tmp_path.rglob("*.html")]
    assert any(f'href="{repository}/blob/main/' in page for page in written)
