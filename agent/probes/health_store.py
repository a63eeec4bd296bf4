"""Stores the health state of devices in a file, so it survives restarts of the agent.

The file belongs on the node, under /run: a pod's own directories are deleted with the pod. It may
be lost at a reboot. Without a file the agent keeps the state in memory.
"""

import os
from pathlib import Path

import msgspec

from agent.probes.device_health import Memory

_decoder = msgspec.json.Decoder(Memory)


class StateFile:
    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._kept: Memory | None = None
        self._not_read = ""
        self._not_written = ""

    @property
    def trouble(self) -> str:
        """Why the file cannot be written or read; empty if it can."""
        return self._not_written or self._not_read

    def read(self) -> Memory:
        """Return the stored state; an empty one if there is no file or it cannot be read."""
        if self._path is None:
            return Memory()
        try:
            return _decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            return Memory()
        except (OSError, ValueError, RecursionError) as err:  # msgspec raises the last two
            self._not_read = f"{self._path} cannot be read, earlier XIDs are not known: {err}"
            return Memory()

    def write(self, memory: Memory) -> None:
        """Replace the file atomically, if ``memory`` differs from the file's content."""
        if self._path is None or memory == self._kept:
            return
        unfinished = self._path.with_suffix(".unfinished")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(msgspec.json.encode(memory))
            os.replace(unfinished, self._path)
        except OSError as err:
            why = err.strerror or type(err).__name__
            self._not_written = f"{self._path} cannot be written, XIDs are lost at a restart: {why}"
        else:
            self._kept, self._not_written = memory, ""
