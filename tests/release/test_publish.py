"""Checks the order of the commands that publish a release, and that they sign the pushed
artefacts.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from release.publish import BUILD_FLAGS, publish, push_images

REGISTRY = "registry.example/team"
EXTENDER, AGENT, CHART = (f"sha256:{digit * 64}" for digit in "123")


class Recorded:
    """Records commands and prints what the real programs would print. A command that contains
    ``fails`` fails.
    """

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.commands: list[str] = []
        self.variables: list[Mapping[str, str]] = []

    def __call__(self, command: list[str], variables: Mapping[str, str]) -> str:
        text = " ".join(command)
        if self.fails and self.fails in text:
            raise subprocess.CalledProcessError(1, command)
        self.commands.append(text)
        self.variables.append(variables)
        if "imagetools" in text:
            return f"{EXTENDER if 'extender' in text else AGENT}\n"
        return f"Pushed: {REGISTRY}/charts/headroom:0.2.0\nDigest: {CHART}\n"


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    for name in ("SHA256SUMS", "RELEASE_NOTES.md", "headroom-0.2.0.tgz", "headroom.yaml"):
        (tmp_path / name).touch()
    for name in ("headroom_gpu-0.2.0.tar.gz", "headroom_gpu-0.2.0-py3-none-any.whl"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.fixture
def digests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digests")
    for name, digest in (("extender", EXTENDER), ("agent", AGENT)):
        (folder / f"headroom-{name}").write_text(f"{digest}\n")
    return folder


def test_the_job_that_builds_images_signs_nothing(tmp_path: Path, digests: Path) -> None:
    recorded = Recorded()
    push_images("0.2.0", REGISTRY, tmp_path / "new", recorded)
    inspect = f"docker buildx imagetools inspect {REGISTRY}/headroom"
    assert recorded.commands == [
        "sh deploy/images.sh",
        f"{inspect}-extender:0.2.0 --format {{{{.Manifest.Digest}}}}",
        f"{inspect}-agent:0.2.0 --format {{{{.Manifest.Digest}}}}",
    ]
    assert "linux/amd64,linux/arm64" in BUILD_FLAGS
    assert recorded.variables[0] == {
        "VERSION": "0.2.0", "REGISTRY": REGISTRY, "FLAGS": BUILD_FLAGS, "BUILDER": "docker",
    }  # fmt: skip
    for each in digests.iterdir():
        assert (tmp_path / "new" / each.name).read_text() == each.read_text()


def test_pushed_artefacts_are_signed_by_digest_and_packages_come_last(
    dist: Path, digests: Path
) -> None:
    recorded = Recorded()
    publish("0.2.0", REGISTRY, dist, digests, recorded, "helm")
    sums = f"{dist}/SHA256SUMS"
    attest = f"cosign attest --yes --type cyclonedx --predicate {dist}/headroom"
    *before, release, upload = recorded.commands
    assert before == [
        f"cosign sign --yes {REGISTRY}/headroom-extender@{EXTENDER}",
        f"{attest}-extender_0.2.0.cdx.json {REGISTRY}/headroom-extender@{EXTENDER}",
        f"cosign sign --yes {REGISTRY}/headroom-agent@{AGENT}",
        f"{attest}-agent_0.2.0.cdx.json {REGISTRY}/headroom-agent@{AGENT}",
        f"helm push {dist}/headroom-0.2.0.tgz oci://{REGISTRY}/charts",
        f"cosign sign --yes {REGISTRY}/charts/headroom@{CHART}",
        f"cosign sign-blob --yes --bundle {sums}.sigstore.json {sums}",
    ]
    assert release.startswith("gh release create v0.2.0 --verify-tag --title Headroom 0.2.0 ")
    assert f"{sums}.sigstore.json" in release.split()
    assert upload == (
        f"{sys.executable} -m uv publish --trusted-publishing always"
        f" {dist}/headroom_gpu-0.2.0-py3-none-any.whl {dist}/headroom_gpu-0.2.0.tar.gz"
    )


@pytest.mark.parametrize("fails", ["cosign sign --yes", "helm push", "sign-blob"])
def test_publishing_stops_after_a_failure(dist: Path, digests: Path, fails: str) -> None:
    recorded = Recorded(fails)
    with pytest.raises(subprocess.CalledProcessError):
        publish("0.2.0", REGISTRY, dist, digests, recorded, "helm")
    assert not any("gh release" in each or "uv publish" in each for each in recorded.commands)
