"""Publishes what `make release` built: images, chart, packages, signatures, and the release itself.

    python -m release.publish VERSION --registry NAME

Only the release workflow runs it: the signatures are made with the identity of the workflow, and
PyPI accepts no other. The packages come last, because PyPI never accepts a version twice.
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
    """Run a command and print its output. Raises ``CalledProcessError``."""
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


def publish(version: str, registry: str, dist: Path, run: Run, helm: str) -> None:
    """Publish the files in ``dist``. Raises what ``run`` raises, and publishes no more then."""
    build = {"VERSION": version, "REGISTRY": registry, "FLAGS": BUILD_FLAGS, "BUILDER": "docker"}
    run(["sh", SCRIPT], build)
    for name in IMAGES:
        image = f"{registry}/{name}"
        inspect = ["docker", "buildx", "imagetools", "inspect", f"{image}:{version}"]
        digest = _digest(run([*inspect, "--format", "{{.Manifest.Digest}}"], {}))
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
        raise SystemExit(f"release: no digest in the output of the last command: {text}")
    return found[0]


def main() -> int:
    parser = argparse.ArgumentParser(prog="release.publish")
    parser.add_argument("version")
    parser.add_argument("--registry", required=True, help="first part of the names of the images")
    args = parser.parse_args()
    try:
        publish(args.version, args.registry, ROOT / "dist", run, str(tool("helm")))
    except subprocess.CalledProcessError as err:
        sys.stderr.write(f"release: this command failed with {err.returncode}: {err.cmd}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
