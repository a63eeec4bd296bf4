"""What the agent remembers across restarts, in one small file that a reboot may well remove.

It belongs on the node, under /run: a pod's own folders go with the pod, and with them the fences of
devices that failed. Where no file is named the agent remembers until it ends.
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
        """What was lost, or will be; empty where nothing is."""
        return self._not_written or self._not_read

    def read(self) -> Memory:
        """What was last written; nothing where there is no file yet or it cannot be read."""
        if self._path is None:
            return Memory()
        try:
            return _decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            return Memory()
        except (OSError, ValueError, RecursionError) as err:  # of msgspec, too
            self._not_read = f"{self._path} cannot be read, earlier XIDs are not known: {err}"
            return Memory()

    def write(self, memory: Memory) -> None:
        """Keep ``memory``; whole or not at all, and only where it differs from what is kept."""
        if self._path is None or memory == self._kept:
            return
        unfinished = self._path.with_suffix(".unfinished")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(msgspec.json.encode(memory))
            os.replace(unfinished, self._path)
        except OSError as err:
            why = err.strerror or type(err).__name__
            self._not_written = f"{self._path} cannot be written, a restart forgets XIDs: {why}"
        else:
            self._kept, self._not_written = memory, ""
