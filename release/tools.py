"""Tools of other projects, pinned and built as the tests' tools are (tests/gobin)."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def tool(name: str) -> Path:
    """Return the path of a binary; the first build takes a minute."""
    command = [sys.executable, str(ROOT / "tests/gobin/build.py"), name]
    built = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(built.stdout.strip().partition("\t")[2])
