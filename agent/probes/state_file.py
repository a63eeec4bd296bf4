"""Files on the node that keep the agent's state across restarts."""

import os
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

_T = TypeVar("_T", bound=msgspec.Struct)


class StateFile(Generic[_T]):
    """Stores one value of the type of ``empty`` as JSON.

    The file should be under /run on the node, because a pod's own directories are deleted with the
    pod. It may be lost at a reboot. If ``path`` is None, nothing is stored. ``lost`` describes in
    messages what is lost without the file.
    """

    def __init__(self, path: Path | None, empty: _T, lost: str) -> None:
        self._path = path
        self._empty = empty
        self._lost = lost
        self._decoder = msgspec.json.Decoder(type(empty))
        #: The value that was last written.
        self._written: _T | None = None
        self._read_error = ""
        self._write_error = ""

    @property
    def trouble(self) -> str:
        """Why the last write failed, or else why the read failed. Empty if both succeeded."""
        return self._write_error or self._read_error

    def read(self) -> _T:
        """Return the stored value, or ``empty`` if there is no file or it cannot be read."""
        if self._path is None:
            return self._empty
        try:
            return self._decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            return self._empty
        except (OSError, ValueError, RecursionError) as err:  # msgspec can raise the last two
            self._read_error = (
                f"{self._path} cannot be read, so earlier {self._lost} are unknown: {err}"
            )
            return self._empty

    def write(self, value: _T) -> None:
        """Replace the file atomically if ``value`` differs from the value last written."""
        if self._path is None or value == self._written:
            return
        unfinished = self._path.with_suffix(".unfinished")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(msgspec.json.encode(value))
            os.replace(unfinished, self._path)
        except OSError as err:
            why = err.strerror or type(err).__name__
            self._write_error = (
                f"{self._path} cannot be written, so {self._lost} are lost at a restart: {why}"
            )
        else:
            self._written, self._write_error = value, ""
