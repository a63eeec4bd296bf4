"""Reads files, flags and environment of another process, through its directory in /proc.

A file may be written by anyone, so size and nesting are limited before it is decoded.
"""

import os
import stat
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 20
#: Maximum size of a file: parsing takes some hundred times its size, and 3 s for each MiB.
_MOST_FILE_BYTES = 256 << 10
_MOST_DEPTH = 64
#: Maximum length of a YAML value, which can be a number to the base of 60.
_MOST_VALUE_CHARS = 4096
#: Maximum of dots in a line of TOML. Each creates a table, whose full name the decoder keeps.
_MOST_DOTS = 64


class ConfigFiles:
    """Decodes YAML and TOML files, and decodes a file again only if it changed."""

    def __init__(self) -> None:
        self._decoded: dict[Path, tuple[tuple[int, int, int], Any]] = {}

    def read(self, process: Path, path: str) -> Any:
        """Return a decoded YAML or TOML file of a process's mount namespace.

        Raises ``OSError`` and ``ValueError``.
        """
        there = inside(process, path)
        # Reading a pipe or a device might not end.
        with open(os.open(there, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise OSError(f"{path} is not a regular file")
            signature = (found.st_ino, found.st_mtime_ns, found.st_size)
            last = self._decoded.get(there)
            if last is None or last[0] != signature:
                text = file.read(_MOST_FILE_BYTES + 1).decode()
                if len(text) > _MOST_FILE_BYTES:
                    raise ValueError(f"{path} is longer than {_MOST_FILE_BYTES} bytes")
                read = _decoded(text, toml=path.endswith(".toml"))
                last = self._decoded[there] = (signature, read)
        return last[1]


def inside(process: Path, path: str) -> Path:
    """Return ``path`` as seen by the process, through its ``root`` or ``cwd`` in /proc."""
    own = Path(path)
    return process / ("root" if own.is_absolute() else "cwd") / path.lstrip("/")


def _decoded(text: str, toml: bool) -> Any:
    """Decode TOML or YAML. Raises ``ValueError``."""
    if toml:
        if any(line.count(".") > _MOST_DOTS for line in text.splitlines()):
            raise ValueError("too many nested tables in one line")
        try:
            return tomllib.loads(text)
        except RecursionError as err:
            raise ValueError("not TOML") from err
    try:
        import yaml
    except ImportError as err:
        raise ValueError("Python package pyyaml is missing") from err
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader, if it is installed
    depth = 0
    try:
        for event in yaml.parse(text, loader):
            if isinstance(event, yaml.AliasEvent):  # a few hundred bytes can expand to gigabytes
                raise ValueError("aliases are not supported")
            if isinstance(event, yaml.ScalarEvent):
                if event.value == "<<":
                    raise ValueError("merge keys are not supported")
                if len(event.value) > _MOST_VALUE_CHARS:
                    raise ValueError("a value is too long")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _MOST_DEPTH:  # each level uses stack, and an overflow ends the process
                raise ValueError("nested too deeply")
        return yaml.load(text, loader)
    except (yaml.YAMLError, RecursionError, LookupError, AttributeError) as err:
        # The last two are raised if a value does not match its tag, as in "!!bool maybe".
        raise ValueError("not YAML") from err


def flags_of(process: Path) -> dict[str, str]:
    """Return the flags of a process; see ``parse_flags``."""
    arguments = (read_text(process / "cmdline") or "").split("\0")[1:]
    return parse_flags(arguments)


def parse_flags(arguments: Sequence[str]) -> dict[str, str]:
    """Parse --name=value and --name value; values of a repeated flag are joined with commas."""
    found: dict[str, str] = {}
    # The list is empty if the process has ended.
    for argument, after in zip(arguments, [*arguments[1:], ""], strict=False):
        if not argument.startswith("-"):
            continue
        name, equals, value = argument.lstrip("-").partition("=")
        if not equals and not after.startswith("-"):
            value = after
        found[name] = f"{found[name]},{value}" if name in found else value
    return found


def environment_of(process: Path) -> dict[str, str] | None:
    text = read_text(process / "environ")
    if text is None:
        return None
    pairs = (pair.partition("=") for pair in text.split("\0") if pair)
    return {name: value for name, _, value in pairs}


def read_text(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
