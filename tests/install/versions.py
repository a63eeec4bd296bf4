"""Builds two versions of Headroom for upgrade tests: the working tree, and a next version that is
made from it.

The next version has a higher version number, and its CRD has an additional field and printer
column. ``make release`` builds the chart package of each version. Both versions run the same code.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

from release.chart import build_chart
from release.source import Source, version_of
from tests.controlplane import ROOT

REGISTRY = "registry.example"
#: The field of GPUNode.spec and the printer column that only the next version has.
FIELD, COLUMN = "note", "NOTE"


@dataclass(frozen=True, slots=True)
class Version:
    """The image tag and the chart package of a version."""

    tag: str
    package: Path


def working_tree(folder: Path) -> Version:
    """Build the package of the working tree in the folder."""
    return _packaged(version_of(ROOT), ROOT, folder)


def next_version(folder: Path) -> Version:
    """Copy the chart's tracked files into the folder, change them, and build the package."""
    sources = folder / "next"
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--", "deploy", "pyproject.toml"]
    tracked = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    for name in tracked.rstrip("\0").split("\0"):
        target = sources / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    project = sources / "pyproject.toml"
    major, minor, _ = version_of(ROOT).split(".")
    tag = f"{major}.{int(minor) + 1}.0"
    project.write_text(
        re.sub(r'(?m)^version = ".*"$', f'version = "{tag}"', project.read_text(), count=1)
    )
    _change_crd(sources / "deploy/base/crd.yaml")
    return _packaged(tag, sources, folder)


def _change_crd(path: Path) -> None:
    crd = yaml.safe_load(path.read_text())
    (version,) = crd["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"][FIELD] = {"type": "string", "maxLength": 64}
    column = {"name": COLUMN.capitalize(), "type": "string", "jsonPath": f".spec.{FIELD}"}
    version["additionalPrinterColumns"].append(column)
    path.write_text(yaml.safe_dump(crd))


def _packaged(tag: str, sources: Path, folder: Path) -> Version:
    source = Source(
        version=tag,
        epoch_s=0,
        folder=sources,
        tagged=False,
        revision="",
        repository="https://headroom.example",
    )
    return Version(tag, build_chart(source, REGISTRY, folder))
