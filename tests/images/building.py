"""Builds Headroom's images with buildah, on a base image that consists of Debian packages.

The build needs no registry. The base image and the layers of earlier builds are kept outside the
repository, next to the binaries of ``tests.gobin``. The base image is rebuilt only if its recipe
changes.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.controlplane import ROOT
from tests.debian import containers
from tests.gobin.build import default_cache, locked, say

#: Packages of the base image, in addition to a minimal Debian.
PACKAGES = ("python3", "python3-pip")
SUITE = platform.freedesktop_os_release()["VERSION_CODENAME"]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Maximum number of images and containers in the storage. If there are more, the storage is
#: emptied, because builds of changed sources leave layers that are never used again, and a killed
#: test leaves its container.
MOST_KEPT = 200
#: Files of this machine that configure a mirror and trusted certificates for pip.
_PIP_FILES = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
_BASE = "localhost/headroom-base:tests"
#: A wrapper for buildah that does not compress archives, because compression takes most of the CPU
#: of a build. ``--disable-compression`` has no effect for these archives.
_UNCOMPRESSED = """#!/bin/sh
[ "$1" = push ] && shift && set -- push --compression-format=gzip --compression-level=0 "$@"
exec buildah "$@"
"""


class BuildFailed(Exception):
    """A command of the build failed. The message contains the end of its output."""


class Builder:
    """Runs buildah with a separate storage. Needs root.

    Raises ``tests.debian.Unavailable`` if buildah is missing and cannot be downloaded.
    """

    def __init__(self) -> None:
        self.home = default_cache().parent / "images"
        inside = f'{containers()} && exec "$@"'
        self._inside = "unshare", "--mount", "sh", "-c", inside, "sh"
        configuration = self.home / ".config/containers"
        configuration.mkdir(parents=True, exist_ok=True)
        accept = {"default": [{"type": "insecureAcceptAnything"}]}
        (configuration / "policy.json").write_text(json.dumps(accept))
        storage = self.home / "storage"
        (configuration / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{storage}"\nrunroot = "{storage}-run"\n'
        )
        self._builder = self.home / "bin/buildah"
        self._builder.parent.mkdir(exist_ok=True)
        self._builder.write_text(_UNCOMPRESSED)
        self._builder.chmod(0o755)
        self._env = os.environ | {
            "HOME": str(self.home),
            "CONTAINERS_STORAGE_CONF": str(configuration / "storage.conf"),
            "BUILDAH_ISOLATION": "chroot",
        }

    def build(
        self, version: str, registry: str, command: str = "make --silent images", **more: str
    ) -> str:
        """Build both images with a shell command, and return its output.

        The environment of the command contains ``BASE`` and ``more``, which are variables of ``make
        images``.
        """
        with self._locked():
            self._bound()
            variables = {
                "BASE": self.base(),
                "VERSION": version,
                "REGISTRY": registry,
                "BUILDER": str(self._builder),
                "FLAGS": " ".join(["--quiet", "--layers", *_pip_flags()]),
                **more,
            }
            return self._run(["sh", "-euc", command], ROOT, variables)

    def build_from(self, containerfile: str, context: Path, image: str) -> None:
        """Build an image from the text of a Containerfile."""
        with self._locked():
            build = "build", "--quiet", "--layers", "--tag", image, "--file", "-", str(context)
            self.buildah(*build, stdin=containerfile)

    def save(self, image: str, archive: Path) -> None:
        """Write an archive in Docker's format. Its layers are not compressed, because compression
        takes long.
        """
        archive.unlink(missing_ok=True)
        self.buildah("push", "--quiet", image, f"docker-archive:{archive}:{image}")

    def run(self, image: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a new container of the image, as the user of the image."""
        name = self.buildah("from", image)
        try:
            return subprocess.run(
                [*self._inside, "buildah", "run", name, "--", *command],
                env=self._env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            self.buildah("rm", name)

    def base(self) -> str:
        """Return the digest of the base image. Building a missing base image takes about a
        minute.
        """
        recipe = hashlib.sha256(repr((PACKAGES, SUITE, PATH)).encode()).hexdigest()[:16]
        tarball = self.home / f"base-{recipe}.tar"
        if not tarball.exists():
            say("base image: making it from Debian packages, a minute")
            self._make_base(tarball)
        if not self.buildah("images", "--quiet", "--filter", f"reference={_BASE}"):
            name = self.buildah("from", "scratch")
            try:
                self.buildah("add", "--quiet", name, str(tarball), "/")
                self.buildah("config", "--env", f"PATH={PATH}", "--cmd", "python3", name)
                self.buildah("commit", "--quiet", name, _BASE)
            finally:
                self.buildah("rm", name)
        return f"{_BASE.rpartition(':')[0]}@{self.inspect(_BASE)['FromImageDigest']}"

    def inspect(self, image: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.buildah("inspect", "--type", "image", image))
        return found

    def buildah(self, *arguments: str, stdin: str | None = None) -> str:
        return self._run(["buildah", *arguments], self.home, {}, stdin)

    def _locked(self) -> Any:
        return locked(self.home / "lock")

    def _bound(self) -> None:
        images = self.buildah("images", "--all", "--quiet").split()
        if len(images) + len(self.buildah("containers", "--quiet").split()) > MOST_KEPT:
            self._forget_images()

    def _make_base(self, tarball: Path) -> None:
        for old in self.home.glob("base-*.tar"):
            old.unlink()
        self._forget_images()
        unfinished = tarball.with_suffix(".unfinished")
        command = ["mmdebstrap", "--variant=minbase", "--format=tar", "--mode=root", "--quiet"]
        command += [f"--include={','.join(PACKAGES)}", SUITE, str(unfinished)]
        self._run(command, self.home, {})
        unfinished.rename(tarball)

    def _forget_images(self) -> None:
        for each in ("storage", "storage-run"):
            shutil.rmtree(self.home / each, ignore_errors=True)

    def _run(
        self, command: list[str], cwd: Path, more: Mapping[str, str], stdin: str | None = None
    ) -> str:
        done = subprocess.run(
            [*self._inside, *command],
            cwd=cwd,
            env=self._env | dict(more),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise BuildFailed(f"{' '.join(command)}:\n{(done.stdout + done.stderr)[-8000:]}")
        return done.stdout.strip()


def _pip_flags() -> list[str]:
    """Return flags that mount the machine's pip settings into RUN instructions of the build."""
    return [f"--volume={each}:{each}:ro" for each in _PIP_FILES if os.path.exists(each)]
