"""Checks the Dockerfile and the locks that it installs, without a build."""

import re

import pytest

from tests.controlplane import ROOT


def locked(lock: str) -> dict[str, str]:
    """Return the version and the hashes of each package in a lock file, as they are written.

    Platform conditions are removed, because the tests may need a package on platforms that the
    image does not support.
    """
    text = re.sub(r" ; .*(?= \\\n)", "", (ROOT / f"requirements/{lock}.txt").read_text().strip())
    return {block.partition("==")[0]: block for block in re.split(r"\n(?=\w)", text)}


@pytest.mark.parametrize("target", ["extender", "agent"])
def test_the_image_has_the_package_versions_of_the_tests(target: str) -> None:
    own, tests = locked(target), locked("test")
    assert len(own) > 5
    assert {name: tests.get(name) for name in own} == own
    assert locked("build") == {"setuptools": tests["setuptools"]}


def test_every_stage_uses_the_base_image_by_digest() -> None:
    text = (ROOT / "Dockerfile").read_text()
    stages = dict(
        (name, base) for base, name in re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)
    )
    assert len(stages) == text.count("\nFROM ")
    bases = {base for base in stages.values() if base not in stages}
    assert bases == {"${PYTHON}@${PYTHON_DIGEST}", "scratch"}
    # Both images contain only copied files.
    assert (stages["extender"], stages["agent"]) == ("scratch", "scratch")
    # The digest must be given, because it has no default.
    assert "ARG PYTHON=python:3.12-slim\nARG PYTHON_DIGEST\n" in text
