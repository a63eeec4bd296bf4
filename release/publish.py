"""Publishes a release: images, chart, packages, signatures, and the release itself.

    python -m release.publish VERSION --registry NAME --images
    python -m release.publish VERSION --registry NAME

The first command builds and pushes the images, and writes their digests into ``digests/``. The
second command builds nothing: it signs these digests, and publishes what `make release` built. Only
the release workflow runs them, in jobs with different rights. The workflow's identity makes the
signatures, and PyPI accepts no other identity. The packages come last, because PyPI never accepts a
version twice.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from release.images import SCRIPT
from release.tools import ROOT, tool

IMAGES = ("headroom-extender", "headroom-agent")
#: Flags of `docker build`: both architectures, with a list of all packages of the base image.
BUILD_FLAGS = "--platform linux/amd64,linux/arm64 --push --sbom=true --provenance=mode=max"

#: Runs a command with additional variables; returns its output, stderr included.
Run = Callable[[list[str], Mapping[str, str]], str]


def run(command: list[str], variables: Mapping[str, str]) -> str:
    """Run a command and print its output. Raises ``CalledProcessError`` if it fails."""
    sys.stdout.write(f"{' '.join(command)}\n")
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    sys.stdout.write(done.stdout)
    done.check_returncode()
    return done.stdout


def push_images(version: str, registry: str, digests: Path, run: Run) -> None:
    """Build and push the images; write the digest of each into a file in ``digests``.

    Raises what ``run`` raises.
    """
    build = {"VERSION": version, "REGISTRY": registry, "FLAGS": BUILD_FLAGS, "BUILDER": "docker"}
    run(["sh", SCRIPT], build)
    digests.mkdir(exist_ok=True)
    for name in IMAGES:
        image = f"{registry}/{name}:{version}"
        inspect = ["docker", "buildx", "imagetools", "inspect", image]
        digest = _digest(run([*inspect, "--format", "{{.Manifest.Digest}}"], {}))
        (digests / name).write_text(f"{digest}\n")


def publish(version: str, registry: str, dist: Path, digests: Path, run: Run, helm: str) -> None:
    """Sign the images with these ``digests``, and sign and publish the files in ``dist``.

    If ``run`` raises an exception, nothing more is published, and the exception is raised.
    """
    for name in IMAGES:
        image, digest = f"{registry}/{name}", _digest((digests / name).read_text())
        run(["cosign", "sign", "--yes", f"{image}@{digest}"], {})
        listed = ["--type", "cyclonedx", "--predicate", f"{dist}/{name}_{version}.cdx.json"]
        run(["cosign", "attest", "--yes", *listed, f"{image}@{digest}"], {})
    pushed = run([helm, "push", f"{dist}/headroom-{version}.tgz", f"oci://{registry}/charts"], {})
    run(["cosign", "sign", "--yes", f"{registry}/charts/headroom@{_digest(pushed)}"], {})
    sums = f"{dist}/SHA256SUMS"
    run(["cosign", "sign-blob", "--yes", "--bundle", f"{sums}.sigstore.json", sums], {})
    files = sorted(str(path) for path in {*dist.iterdir(), Path(f"{sums}.sigstore.json")})
    title = ["--title", f"Headroom {version}", "--notes-file", f"{dist}/RELEASE_NOTES.md"]
    run(["gh", "release", "create", f"v{version}", "--verify-tag", *title, *files], {})
    packages = sorted(str(path) for path in dist.glob("headroom_gpu-*"))
    run([sys.executable, "-m", "uv", "publish", "--trusted-publishing", "always", *packages], {})


def _digest(text: str) -> str:
    found = re.search(r"sha256:[0-9a-f]{64}", text)
    if found is None:
        raise SystemExit(f"release: no digest: {text}")
    return found[0]


def main() -> int:
    parser = argparse.ArgumentParser(prog="release.publish")
    parser.add_argument("version")
    parser.add_argument("--registry", required=True, help="first part of the names of the images")
    parser.add_argument("--images", action="store_true", help="only build and push the images")
    args = parser.parse_args()
    digests = ROOT / "digests"
    try:
        if args.images:
            push_images(args.version, args.registry, digests, run)
        else:
            helm = str(tool("helm"))
            publish(args.version, args.registry, ROOT / "dist", digests, run, helm)
    except subprocess.CalledProcessError as err:
        sys.stderr.write(f"release: this command failed with {err.returncode}: {err.cmd}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
