"""The commit that is released: its version, its time and its files."""

import subprocess
import tarfile
import tomllib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path


class ReleaseError(Exception):
    """The release cannot be made; the text states why and what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    version: str
    #: The time of the commit in seconds since 1970, which every file in an artefact gets.
    epoch_s: int
    #: A folder that contains only committed files.
    folder: Path
    #: Whether the commit has the tag of the version.
    tagged: bool
    #: The commit's hash.
    revision: str
    #: Address of the repository, whose releases hold the files to which the krew manifest and the
    #: chart link.
    repository: str


def export(root: Path, folder: Path, version: str, repository: str, commit: str = "HEAD") -> Source:
    """Copy the files of a commit of the repository ``root`` into ``folder``.

    Raises ``ReleaseError`` if the commit has another version.
    """

    def git(*arguments: str) -> bytes:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout

    with tarfile.open(fileobj=BytesIO(git("archive", commit))) as archive:
        archive.extractall(folder, filter="data")
    own = version_of(folder)
    if version != own:
        raise ReleaseError(
            f"the version of {commit} is {own}, not {version}: set version in pyproject.toml and "
            f"commit it. Example: make release VERSION={own}"
        )
    epoch_s = int(git("log", "-1", "--format=%ct", commit))
    tags = git("tag", "--points-at", commit).decode().split()
    revision = git("rev-parse", commit).decode().strip()
    tagged = f"v{version}" in tags
    return Source(version, epoch_s, folder, tagged, revision, repository.rstrip("/"))


def version_of(folder: Path) -> str:
    """Return the version in pyproject.toml, the only place that states it."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])
