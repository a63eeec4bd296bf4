"""Finds the programs that tests need on PATH, or downloads them from Debian or Ubuntu packages.

apt downloads a package and checks its signature. apt uses separate folders, so it installs nothing,
needs no privileges, and does not change the machine's package lists. The unpacked files are kept
outside the repository, next to the binaries that ``tests.gobin`` builds.
"""

import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.gobin.build import default_cache, locked, say

_TIMEOUT_S = 300


class Unavailable(Exception):
    """The program is missing and cannot be downloaded. The message contains the reason."""


def prometheus() -> tuple[str, str]:
    """Return the paths of prometheus and promtool. A download takes about ten seconds."""
    here = shutil.which("prometheus"), shutil.which("promtool")
    if here[0] and here[1]:
        return here[0], here[1]
    unpacked = _unpacked("prometheus", ("prometheus",), with_what_it_needs=False)
    return str(unpacked / "usr/bin/prometheus"), str(unpacked / "usr/bin/promtool")


def chromium(package: str = "chromium") -> tuple[str, dict[str, str]]:
    """Return the path of Chromium and an environment in which it finds its libraries.

    The ``package`` "chromium-headless-shell" is Chromium without windows, which uses half the CPU
    time.
    """
    if here := shutil.which(package) or shutil.which("chromium"):
        return here, dict(os.environ)
    # The download of 120 MB takes half a minute, and the unpacked files take 400 MB.
    packages = package, "fonts-dejavu-core"
    unpacked = _unpacked(package, packages, with_what_it_needs=True)
    machine = unpacked / f"usr/lib/{platform.machine()}-linux-gnu"
    folders = machine, machine / "pulseaudio", unpacked / "lib" / machine.name
    found = os.environ | {"LD_LIBRARY_PATH": ":".join(map(str, folders))}
    return str(unpacked / "usr/lib/chromium" / package), found


def ip() -> tuple[str, ...]:
    """Return the command line prefix that runs ``ip``."""
    if here := shutil.which("ip"):
        return (here,)
    unpacked = _unpacked("iproute2", ("iproute2",), with_what_it_needs=True)
    machine = f"lib/{platform.machine()}-linux-gnu"
    folders = f"{unpacked / machine}:{unpacked / 'usr' / machine}"
    (found, *_) = sorted(unpacked.rglob("bin/ip"))
    return "env", f"LD_LIBRARY_PATH={folders}", str(found)


def containers() -> str:
    """Return a shell command that mounts the programs for building and running containers over
    /usr.

    Run the command as root in a separate mount namespace, where buildah, containerd, the CNI
    plugins in /usr/lib/cni, iptables-nft, mmdebstrap and runc then look installed.
    """
    packages = "buildah", "containerd", "containernetworking-plugins", "mmdebstrap", "runc"
    # The download takes 50 MB, and the unpacked files take 180 MB.
    unpacked = _unpacked("containers", packages, with_what_it_needs=True, again=True)
    return f"mount -t overlay overlay -o lowerdir={unpacked}/usr:/usr /usr"


def _unpacked(
    name: str, packages: tuple[str, ...], with_what_it_needs: bool, again: bool = False
) -> Path:
    """Return the folder with the unpacked packages.

    If ``with_what_it_needs`` is true, also unpack the dependencies that this machine lacks. If
    ``again`` is true, also unpack packages that are installed.
    """
    folder = default_cache().parent / "debian" / name
    with locked(folder.parent / f"{name}.lock"):
        if not folder.exists():
            _fetch(folder, packages, with_what_it_needs, again)
    return folder


def _fetch(
    unpacked: Path, packages: tuple[str, ...], with_what_it_needs: bool, again: bool
) -> None:
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise Unavailable(f"no {packages[0]} on PATH, and no apt-get to fetch it with")
    say(f"{packages[0]}: fetching Debian's package")
    with tempfile.TemporaryDirectory(dir=unpacked.parent) as scratch:
        archives = Path(scratch, "cache/archives")
        for folder in (Path(scratch, "state/lists/partial"), archives / "partial"):
            folder.mkdir(parents=True)
        status = "/var/lib/dpkg/status" if with_what_it_needs else "/dev/null"
        apt = ["apt-get", "-qq", "-o", f"Dir::Cache={scratch}/cache"]
        apt += ["-o", f"Dir::State={scratch}/state", "-o", f"Dir::State::status={status}"]
        # If apt runs as root, it downloads as another user, who cannot write to this folder.
        apt += ["-o", "APT::Sandbox::User="]
        _run(scratch, *apt, "update")
        if with_what_it_needs:
            only = ("install", "--download-only", "--no-install-recommends", "--yes")
            _run(scratch, *apt, *only, *(("--reinstall",) if again else ()), *packages)
        else:
            _run(str(archives), *apt, "download", *packages)
        for package in archives.glob("*.deb"):
            _run(scratch, "dpkg", "-x", str(package), "unpacked")
        shutil.rmtree(Path(scratch, "unpacked/usr/share/doc"), ignore_errors=True)
        Path(scratch, "unpacked").rename(unpacked)


def _run(folder: str, *command: str) -> None:
    what = " ".join(command[:1] + command[-2:])
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise Unavailable(f"{what}: {err}") from err
    if done.returncode:
        raise Unavailable(f"{what}: {done.stdout[-500:].strip()}")
