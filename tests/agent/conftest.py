"""The fake driver library, built once for each state of its source, and the agent run on it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.driver import library_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def driver_folder() -> Path:
    """A folder with libnvidia-ml.so.1 in it, for LD_LIBRARY_PATH."""
    return library_folder()


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
