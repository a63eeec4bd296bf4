"""Writes archives that are equal byte by byte if their contents are equal."""

import gzip
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path


@dataclass(frozen=True, slots=True)
class File:
    #: The path in the archive.
    name: str
    content: bytes
    executable: bool = False


def write_tar_gz(path: Path, files: Iterable[File], epoch_s: int) -> None:
    """Write the files, sorted by name. All of them belong to root and have the time ``epoch_s``."""
    with (
        path.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=epoch_s) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for file in sorted(files, key=lambda file: file.name):
            member = tarfile.TarInfo(file.name)
            member.size, member.mtime = len(file.content), epoch_s
            member.mode = 0o755 if file.executable else 0o644
            archive.addfile(member, BytesIO(file.content))


def normalise(path: Path, epoch_s: int) -> None:
    """Rewrite a ``.tar.gz`` without the time and the user of its creation."""
    with tarfile.open(path) as archive:
        files = [
            File(member.name, content.read(), bool(member.mode & 0o100))
            for member in archive
            if (content := archive.extractfile(member))
        ]
    write_tar_gz(path, files, epoch_s)
