"""Reads the checkpoint of the kubelet's device manager again when the file has changed."""

import os
from collections.abc import Callable
from pathlib import Path

from agent.probes.checkpoint import BadCheckpoint, Checkpoint, read_checkpoint
from agent.probes.readings import SourceReading

CHECKPOINT = "checkpoint"

#: Seconds between two computations of the checksum if the file changes with every sample.
VERIFY_EVERY_S = 300.0


class CheckpointFile:
    """The checkpoint, which is parsed again only if the file has changed.

    The checksum takes the most CPU time, so it is computed at the first sample in which the file
    has not changed. If the file changes with every sample, the checksum is computed every
    ``VERIFY_EVERY_S`` seconds. After a file that could not be used, the next file is verified
    immediately.
    """

    def __init__(self, path: Path, monotonic_s: Callable[[], float]) -> None:
        self._path = path
        self._monotonic_s = monotonic_s
        self._signature: tuple[int, int, int] | None = None
        self._last: tuple[Checkpoint | None, SourceReading] = (None, SourceReading(CHECKPOINT))
        #: When a checksum was last computed.
        self._verified_s = float("-inf")

    def read(self) -> tuple[Checkpoint | None, SourceReading]:
        """Return the content (None if it cannot be read), and the state of the source."""
        try:
            found = self._path.stat()
            signature = (found.st_ino, found.st_mtime_ns, found.st_size)
            changed = signature != self._signature
            checkpoint, source = self._last
            if changed or (checkpoint is not None and checkpoint.verified is None):
                late = self._monotonic_s() - self._verified_s >= VERIFY_EVERY_S
                self._last = self._parsed(not changed or late or source.state != "ok")
                self._signature = signature
        except OSError as err:
            self._signature = None
            why = why_not_read(err, "no file; it is mounted from /var/lib/kubelet/device-plugins")
            missing = isinstance(err, FileNotFoundError)
            return None, SourceReading(CHECKPOINT, "absent" if missing else "degraded", why)
        return self._last

    def _parsed(self, verify: bool) -> tuple[Checkpoint | None, SourceReading]:
        try:
            checkpoint = read_checkpoint(self._path, verify=verify)
        except BadCheckpoint as err:
            return None, SourceReading(CHECKPOINT, "degraded", str(err))
        if verify:
            self._verified_s = self._monotonic_s()
        if checkpoint.left_out:
            why = f"skipped parts that cannot be read: {checkpoint.left_out}"
            return checkpoint, SourceReading(CHECKPOINT, "degraded", why)
        if checkpoint.verified is False:
            why = "its checksum does not match its content"
            return checkpoint, SourceReading(CHECKPOINT, "degraded", why)
        return checkpoint, SourceReading(CHECKPOINT)


def why_not_read(err: OSError, missing: str) -> str:
    """Return ``missing`` if there is no file, otherwise the system's description of the error."""
    if isinstance(err, FileNotFoundError):
        return missing
    return os.strerror(err.errno or 0)
