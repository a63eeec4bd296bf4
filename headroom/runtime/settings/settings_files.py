"""Reads settings from a YAML file, or from a folder of YAML files such as a mounted ConfigMap.

In a folder, each file is one layer: the settings that Headroom ships, those that an overlay or a
component changes, and the user's own. The files are read in the order of their names, and a later
file overrides an earlier one. So no layer has to repeat, or can lose, the settings of another.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from headroom.errors import BadSettings

#: Maximum size of a file, which limits parsing time: PyYAML takes quadratic time for a long string,
#: and 16 us for each bracket.
MAX_BYTES = 64 << 10
#: Maximum number of files in a folder.
MAX_FILES = 16
SUFFIX = ".yaml"

Location = tuple[str | int, ...]
#: Modification time in ns, size in bytes, and inode of each file, by name.
Stamp = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ParsedSettings:
    """The merged content of all files."""

    values: Mapping[str, Any]
    #: The place where each key was set last, for example headroom.yaml:12.
    places: Mapping[Location, str]
    #: Keys that occur more than once in a file, with the place of each repetition.
    repeated: Sequence[tuple[str, str]] = ()


def read_settings(path: Path) -> ParsedSettings:
    """Read a file, or all files of a folder. Raises ``BadSettings`` with the place of the error."""
    values: dict[str, Any] = {}
    places: dict[Location, str] = {}
    repeated: list[tuple[str, str]] = []
    for file in files_of(path):
        content, tree = _parse(file)
        repeated += _note_places(tree, (), places, set(), file, 2)
        values = merged(values, content)
    return ParsedSettings(values, places, repeated)


def merge_texts(texts: Mapping[str, str]) -> dict[str, Any]:
    """Merge the files of a ConfigMap, which are given as texts by name. Raises ``BadSettings``."""
    values: dict[str, Any] = {}
    for name in sorted(texts):
        values = merged(values, _parse_text(name, texts[name])[0])
    return values


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that contains a mapping. Raises ``BadSettings`` with the line of the
    error."""
    return _parse(path)[0]


def files_of(path: Path) -> list[Path]:
    """Return the file, or the files of the folder in the order in which they are read.

    Raises ``BadSettings`` if the folder has no files, too many, or one with another suffix, because
    settings in an unread file would have no effect.
    """
    if not path.is_dir():
        return [path]
    try:
        # The kubelet mounts a ConfigMap through entries whose names begin with two dots.
        found = sorted(each for each in path.iterdir() if not each.name.startswith("."))
    except OSError as err:
        raise BadSettings(f"{path}: cannot be read: {err.strerror}") from err
    for each in found:
        if each.suffix != SUFFIX:
            raise BadSettings(f"{each}: is not read; rename it to {each.stem}{SUFFIX}")
    if not found:
        raise BadSettings(f"{path}: contains no file of settings. Example: headroom{SUFFIX}")
    if len(found) > MAX_FILES:
        raise BadSettings(f"{path}: contains {len(found)} files; at most {MAX_FILES} are read")
    return found


def stamp(path: Path) -> Stamp | None:
    """Return a value that changes whenever a file changes, or None if the files cannot be read."""
    try:
        stats = [(file.name, file.stat()) for file in files_of(path)]
    except (BadSettings, OSError):
        return None
    return tuple((name, stat.st_mtime_ns, stat.st_size, stat.st_ino) for name, stat in stats)


def merged(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the values of ``override``. Nested mappings are merged key by key."""
    result = dict(base)
    for key, value in override.items():
        before = result.get(key)
        both = isinstance(before, dict) and isinstance(value, Mapping)
        result[key] = merged(before or {}, value) if both else value
    return result


def _parse(path: Path) -> tuple[dict[str, Any], yaml.Node | None]:
    """Read a YAML file that contains a mapping. Return its content and its syntax tree."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as err:
        raise BadSettings(f"{path}: cannot be read: {err.strerror}") from err
    return _parse_text(path, text)


def _parse_text(name: Path | str, text: str | bytes) -> tuple[dict[str, Any], yaml.Node | None]:
    """Parse the content of a file. ``name`` is its name in errors."""
    if len(text) > MAX_BYTES:
        raise BadSettings(f"{name}: is larger than {MAX_BYTES >> 10} KiB, the maximum size")
    try:
        text = text if isinstance(text, str) else text.decode()
        content, tree = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as err:
        mark = getattr(err, "problem_mark", None)
        at = f":{mark.line + 1}" if mark else ""
        raise BadSettings(f"{name}{at}: is not YAML: {' '.join(str(err).split())}") from err
    if content is None:
        return {}, None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise BadSettings(f"{name}: must contain a mapping, as in 'policy: pack'")
    return content, tree


def _note_places(
    node: yaml.Node | None,
    parent: Location,
    places: dict[Location, str],
    seen: set[Location],
    file: Path,
    depth: int,
) -> Iterator[tuple[str, str]]:
    """Add the place of each key down to ``depth`` levels. Yield keys that this file repeats."""
    if not isinstance(node, yaml.MappingNode) or not depth:
        return
    for key, value in node.value:
        location, place = (*parent, str(key.value)), f"{file}:{key.start_mark.line + 1}"
        if location in seen:
            yield ".".join(map(str, location)), place
        seen.add(location)
        places[location] = place
        yield from _note_places(value, location, places, seen, file, depth - 1)
