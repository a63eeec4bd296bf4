"""A real Prometheus and its promtool: those on PATH, else Debian's (or Ubuntu's) package.

The package is fetched by apt, which checks its signature, with folders of its own: nothing is
installed, no right is needed, and the machine's lists, which may be old or missing, are left alone.
What was unpacked is kept outside git, beside what ``tests.gobin`` builds.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.gobin.build import default_cache, locked, say

_TIMEOUT_S = 300


class Unavailable(Exception):
    """There is none, and none can be had; says why."""


def programs() -> tuple[str, str]:
    """Paths of prometheus and promtool; fetched, the first time, within some ten seconds."""
    here = shutil.which("prometheus"), shutil.which("promtool")
    if here[0] and here[1]:
        return here[0], here[1]
    unpacked = default_cache().parent / "debian" / "prometheus"
    with locked(unpacked.parent / "prometheus.lock"):
        if not unpacked.exists():
            _fetch(unpacked)
    return str(unpacked / "usr/bin/prometheus"), str(unpacked / "usr/bin/promtool")


def _fetch(unpacked: Path) -> None:
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise Unavailable("no prometheus and promtool on PATH, and no apt-get to fetch them with")
    say("prometheus: fetching Debian's package")
    with tempfile.TemporaryDirectory(dir=unpacked.parent) as scratch:
        for folder in ("state/lists/partial", "cache/archives/partial"):
            Path(scratch, folder).mkdir(parents=True)
        apt = ["apt-get", "-qq", "-o", f"Dir::Cache={scratch}/cache"]
        apt += ["-o", f"Dir::State={scratch}/state", "-o", "Dir::State::status=/dev/null"]
        # As root apt would fetch as another user, who cannot write here.
        apt += ["-o", "APT::Sandbox::User="]
        _run(scratch, *apt, "update")
        _run(scratch, *apt, "download", "prometheus")
        _run(scratch, "dpkg", "-x", *map(str, Path(scratch).glob("*.deb")), "unpacked")
        for name in ("prometheus", "promtool"):
            _run(scratch, f"{scratch}/unpacked/usr/bin/{name}", "--version")
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
