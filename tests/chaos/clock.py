"""Moves the wall clock of one process while it runs."""

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")


class Clock:
    """``environment`` is for the process whose clock it is."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(_library()), "CHAOS_CLOCK": str(file)}

    def move(self, offset_s: float) -> None:
        """Add this to the true time, from now on."""
        with self._file.open("r+b") as file:
            file.write(int(offset_s * 1e9).to_bytes(8, "little", signed=True))


def _library() -> Path:
    """Return the library; it is rebuilt only if its source changes."""
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    library = Path(tempfile.gettempdir(), f"headroom-clock-{os.getuid()}-{digest}.so")
    if not library.exists():
        unfinished = library.with_suffix(f".{os.getpid()}")
        flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
        subprocess.run(["gcc", *flags, "-o", unfinished, _SOURCE, "-ldl"], check=True)
        unfinished.rename(library)
    return library
