"""Returns the release notes: the section of the version in CHANGELOG.md."""

import re

from release.source import ReleaseError, Source

UNRELEASED = "Unreleased"


def notes(source: Source) -> tuple[str, str]:
    """Return the title of the section, without its date, and its text.

    A commit without a tag may lack the section. Then its notes come from ``Unreleased``. Raises
    ``ReleaseError`` if a tagged commit lacks it.
    """
    changelog = (source.folder / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = dict(
        re.findall(r"^## \[(.+?)\].*?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    )
    title = source.version
    if title not in sections and not source.tagged:
        title = UNRELEASED
    if not (text := sections.get(title, "").strip()):
        raise ReleaseError(
            f"CHANGELOG.md has no section {title} or nothing in it: rename {UNRELEASED} and tag "
            f"the commit with the change. Example: ## [{source.version}] - 2026-01-31"
        )
    return title, text + "\n"
