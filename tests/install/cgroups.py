"""Creates and removes the cgroup for the containers of a test node, in every hierarchy."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.waiting import until

CGROUPS = Path("/sys/fs/cgroup")
#: Prefix of a node's folder name. The node's cgroup has the name of the folder.
KIND = "headroom-node-"
_PATIENCE_S = 30.0


def create(name: str) -> None:
    """Create the cgroup. Also remove the cgroups of killed nodes, which have no folder any more."""
    for each in _hierarchies():
        for left in each.glob(f"{KIND}*"):
            if not (Path(tempfile.gettempdir()) / left.name).exists():
                _remove(left)
        (each / name).mkdir()
        _delegate(each)
        _delegate(each / name)


def remove(name: str) -> None:
    """Kill all processes in the cgroup and remove it."""
    folders = [each / name for each in _hierarchies()]

    def removed() -> bool:
        for process in {pid for folder in folders for pid in _processes(folder)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, 9)
        for folder in folders:
            _remove(folder)
        return not any(folder.exists() for folder in folders)

    until(removed, f"the cgroup {name} is removed", _PATIENCE_S, 0.1)


def _hierarchies() -> Iterator[Path]:
    """Yield the single hierarchy of cgroup v2, or the hierarchy of each controller in cgroup v1."""
    if (CGROUPS / "cgroup.controllers").exists():
        yield CGROUPS
        return
    yield from (each for each in CGROUPS.iterdir() if each.is_dir() and not each.is_symlink())


def _delegate(folder: Path) -> None:
    """Enable all available controllers for children of this cgroup (cgroup v2 only)."""
    if (controllers := folder / "cgroup.controllers").exists():
        text = " ".join(f"+{each}" for each in controllers.read_text().split())
        (folder / "cgroup.subtree_control").write_text(text)


def _processes(folder: Path) -> Iterator[int]:
    for each in folder.rglob("cgroup.procs"):
        with contextlib.suppress(OSError):
            yield from map(int, each.read_text().split())


def _remove(folder: Path) -> None:
    if folder.exists():
        for each in sorted(folder.rglob("*"), reverse=True):
            if each.is_dir():
                with contextlib.suppress(OSError):
                    each.rmdir()
        with contextlib.suppress(OSError):
            folder.rmdir()
