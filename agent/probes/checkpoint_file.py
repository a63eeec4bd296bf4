"""Reads the checkpoint of the kubelet's device manager again when the file has changed."""

import os
from pathlib import Path

from agent.probes.checkpoint import BadCheckpoint, Checkpoint, read_checkpoint
from agent.probes.readings import SourceReading

CHECKPOINT = "checkpoint"


class CheckpointFile:
    """The checkpoint, which is parsed again only if the file has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signature: tuple[int, int, int] | None = None
        self._last: tuple[Checkpoint | None, SourceReading] = (None, SourceReading(CHECKPOINT))

    def read(self) -> tuple[Checkpoint | None, SourceReading]:
        """Return the content (None if it cannot be read), and the state of the source."""
        try:
            found = self._path.stat()
            signature = (found.st_ino, found.st_mtime_ns, found.st_size)
            if signature != self._signature:
                self._last = self._parsed()
                self._signature = signature
        except OSError as err:
            self._signature = None
            why = why_not_read(err, "no file; it is mounted from /var/lib/kubelet/device-plugins")
            missing = isinstance(err, FileNotFoundError)
            return None, SourceReading(CHECKPOINT, "absent" if missing else "degraded", why)
        return self._last

    def _parsed(self) -> tuple[Checkpoint | None, SourceReading]:
        try:
            checkpoint = read_checkpoint(self._path)
        except BadCheckpoint as err:
            return None, SourceReading(CHECKPOINT, "degraded", str(err))
        if checkpoint.left_out:
            why = f"skipped parts that cannot be read: {checkpoint.left_out}"
            return checkpoint, SourceReading(CHECKPOINT, "degraded", why)
        return checkpoint, SourceReading(CHECKPOINT)


def why_not_read(err: OSError, missing: str) -> str:
    """Return ``missing`` if there is no file, otherwise the system's description of the error."""
    if isinstance(err, FileNotFoundError):
        return missing
    return os.strerror(err.errno or 0)
