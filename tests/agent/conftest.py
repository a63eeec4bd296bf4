"""The fake driver library, built once for each state of its source, and the agent run on it."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("fake_nvml.c")


@pytest.fixture(scope="session")
def driver_folder() -> Path:
    """A folder with libnvidia-ml.so.1 in it, for LD_LIBRARY_PATH."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"headroom-fake-nvml-{os.getuid()}-{digest}"
    library = folder / "libnvidia-ml.so.1"
    if not library.exists():
        if shutil.which("gcc") is None:
            pytest.fail(
                "gcc is missing: the fake driver library of the agent's tests is C; "
                "right is, for example: apt-get install gcc libc6-dev",
                pytrace=False,
            )
        folder.mkdir(exist_ok=True)
        built = folder / f"building-{os.getpid()}"
        done = subprocess.run(
            [
                *("gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o"),
                built,
                SOURCE,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        built.rename(library)  # at once, so that sessions side by side see all of it or nothing
    return folder


@pytest.fixture
def environment(driver_folder: Path, tmp_path: Path) -> dict[str, str]:
    """For a process of the agent; FAKE_NVML_TABLE names a file that is yet to be written."""
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    return kept | {
        "LD_LIBRARY_PATH": str(driver_folder),
        "FAKE_NVML_TABLE": str(tmp_path / "table"),
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "error",
        "NODE_NAME": "n1",
    }


@pytest.fixture
def report(environment: dict[str, str]) -> Callable[..., dict[str, Any]]:
    """Run the agent once on a device table; returns the status that it prints."""

    def run(table: str, *flags: str) -> dict[str, Any]:
        Path(environment["FAKE_NVML_TABLE"]).write_text(table)
        done = subprocess.run(
            [sys.executable, "-m", "agent", "--once", "--print", *flags],
            env=environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        status: dict[str, Any] = json.loads(done.stdout)
        return status

    return run
