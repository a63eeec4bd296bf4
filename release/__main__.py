"""Builds the artefacts of a release into a folder, which it empties first.

    python -m release VERSION [--repository URL] [--registry NAME] [--out DIR]

It prints each artefact with its size and SHA-256, and what was not built and why.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from release.binary import BINARIES
from release.bom import build_boms
from release.chart import build_chart
from release.client import build_clients
from release.images import build_images
from release.krew import write_manifest
from release.notes import notes
from release.packages import build_packages
from release.source import ReleaseError, Source, export
from release.tools import ROOT

UNKNOWN_REPOSITORY = "https://set-me.invalid/headroom"


def main() -> int:
    parser = argparse.ArgumentParser(prog="release", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", help="the version in pyproject.toml")
    parser.add_argument(
        "--repository", default=UNKNOWN_REPOSITORY, help="address of the repository"
    )
    parser.add_argument("--registry", default="", help="first part of the images' names")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = export(ROOT, Path(folder), args.version, args.repository)
            remarks = build(source, args.registry, args.out)
    except ReleaseError as err:
        sys.stderr.write(f"release: {err}\n")
        return 1
    except subprocess.CalledProcessError as err:
        sys.stderr.write(f"release: this command failed with {err.returncode}: {err.cmd}\n")
        return 1
    if _git("status", "--porcelain"):
        remarks.append("uncommitted changes are not part of the release")
    for remark in remarks:
        sys.stdout.write(f"note: {remark}\n")
    return 0


def build(source: Source, registry: str, out: Path) -> list[str]:
    """Write everything into the emptied folder ``out``; return what the user should know."""
    remarks = []
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    title, text = notes(source)
    (out / "RELEASE_NOTES.md").write_text(text, encoding="utf-8")
    if title != source.version:
        remarks.append(f"the release notes are the section {title} of CHANGELOG.md")
    wheel, _ = build_packages(source, out)
    write_manifest(source, build_clients(source, wheel, out), out / "headroom.yaml")
    build_chart(source, registry, out)
    build_boms(source, out)
    binaries = sorted(BINARIES.glob(f"*_{source.version}_*"))
    for path in binaries:
        shutil.copy(path, out)
    if not binaries:
        remarks.append("programs that need no Python were not built: make binary, on each platform")
    images, reason = build_images(source, registry, out)
    if not images:
        remarks.append(f"the images were not built: {reason}")
    if source.repository == UNKNOWN_REPOSITORY:
        remarks.append(
            "the krew manifest and the chart have no address: set REPOSITORY=https://..."
        )
    remarks.append("nothing is signed: the release workflow does that (RELEASING.md)")
    write_sums(out)
    return remarks


def write_sums(out: Path) -> None:
    """Write SHA256SUMS of all files, and print them with their sizes."""
    lines = []
    for path in sorted(out.iterdir()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        lines.append(f"{digest}  {path.name}\n")
        sys.stdout.write(f"{path.stat().st_size:>12,}  {digest}  {path.name}\n")
    (out / "SHA256SUMS").write_text("".join(lines))


def _git(*arguments: str) -> str:
    command = ["git", "-C", os.fspath(ROOT), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
