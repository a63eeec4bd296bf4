"""Settings from a file, the environment and the command line: which counts, what is wrong where.

The command line comes before the environment and that before the file, each setting for itself.
Whatever is refused is told with its place: the line of the file, the variable or the flag, and
with a right example.
"""

import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from contract.service_links import service_links
from extender.config.consistency import Contradiction
from extender.config.settings import EXAMPLES, Settings
from extender.errors import BadSettings

PREFIX, NESTED = "HEADROOM_", "__"
#: Variables of ``kubectl headroom`` and of the tests, which people have in their shells.
OTHERS = ("HEADROOM_SERVER", "HEADROOM_TOKEN", "HEADROOM_CACHE")
#: Of a file: a single long text in YAML takes time with the square of its length, and each bracket
#: 16 us.
MOST_BYTES = 64 << 10

_Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """``where`` is as in headroom.yaml:12, $HEADROOM_POLICY or --verbs-port."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass(frozen=True, slots=True)
class Written:
    """A YAML file that holds a mapping, and on which line each key of it is."""

    values: dict[str, Any]
    lines: Mapping[_Path, int]
    #: Keys that are there again.
    twice: Sequence[tuple[str, int]] = ()


class _Environment(EnvSettingsSource):
    """Variables of the given environment; lists are written with commas, or as JSON."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = {name.lower(): value for name, value in env.items()}
        super().__init__(_Variables)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return self._env

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        text = str(value).strip()
        if text[:1] in ("[", "{"):
            try:
                return json.loads(text)
            except ValueError:
                return text  # told by the type that it is not
        return [part.strip() for part in text.split(",") if part.strip()]


class _Variables(Settings, BaseSettings):
    """The settings as variables of the environment; never made, only described."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter=NESTED)


def load_settings(
    path: Path | None, env: Mapping[str, str] | None = None, **overrides: Any
) -> Settings:
    """The settings of the file, ``env`` (the process's own where it is None) and the overrides that
    are not None. Raises ``BadSettings``, with a line for each problem."""
    settings, problems = look(path, os.environ if env is None else env, overrides)
    if settings is None:
        raise BadSettings("\n".join(map(str, problems)))
    return settings


def look(
    path: Path | None, env: Mapping[str, str], overrides: Mapping[str, Any]
) -> tuple[Settings | None, list[Problem]]:
    """The settings, or all that is wrong with them."""
    where = path or "settings"
    try:
        written = read_written(path) if path else Written({}, {})
    except BadSettings as err:
        return None, [Problem(*str(err).split(": ", 1))]
    problems = [
        Problem(f"{where}:{line}", f"{key} is there twice; right is to say it once")
        for key, line in written.twice
    ]
    env = {name: value for name, value in env.items() if name.startswith(PREFIX)}
    known = _variables()
    links = service_links(env)
    for name in sorted(env.keys() - known.keys() - set(OTHERS) - links):
        close = difflib.get_close_matches(name, known, 1)
        right = f"; right is, perhaps, {close[0]}" if close else ", see docs/settings.md"
        problems.append(Problem(f"${name}", f"is no setting{right}"))
    env = {name: value for name, value in env.items() if name in known and name not in links}
    flags = {name: value for name, value in overrides.items() if value is not None}
    values = _over(_over(written.values, _Environment(env)()), flags)

    def places(loc: _Path) -> Iterator[str]:
        """Where it was said, the place that counts first."""
        name = str(loc[0])
        if name in flags:
            yield "--" + name.replace("_", "-")
        for variable in (PREFIX + NESTED.join(map(str, loc)).upper(), PREFIX + name.upper()):
            if variable in env:
                yield f"${variable}"
        for length in range(len(loc), 0, -1):
            if loc[:length] in written.lines:
                yield f"{where}:{written.lines[loc[:length]]}"

    def place(loc: _Path) -> str:
        return next(places(loc), str(where)) if loc else str(where)

    try:
        settings = Settings(**values)
    except ValidationError as err:
        problems += [_problem(finding, place) for finding in err.errors()]
        return None, problems
    return (None if problems else settings), problems


def _problem(finding: Any, place: Any) -> Problem:
    loc: _Path = finding["loc"]
    name, message = ".".join(map(str, loc)), str(finding["msg"]).removeprefix("Value error, ")
    cause = (finding.get("ctx") or {}).get("error")
    if isinstance(cause, Contradiction):
        said = dict.fromkeys(place((each,)) for each in cause.settings)
        return Problem(", ".join(said), message)
    if finding["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(loc[-1]), _names(loc[:-1]), 1)
        right = f"; right is, perhaps, {close[0]}" if close else ", see docs/settings.md"
        return Problem(place(loc), f"{name} is no setting{right}")
    if loc and "right is" not in message and (example := example_of(loc)):
        message += f"; right is, for example, {example}"
    return Problem(place(loc), f"{name}: {message}" if loc else message)


def example_of(loc: _Path) -> str:
    """A right line for the setting; empty where there is none."""
    name = str(loc[0])
    if name in EXAMPLES:
        return f"{name}: {EXAMPLES[name]}"
    field = Settings.model_fields.get(name)
    return "" if field is None or field.default is None else f"{name}: {as_yaml(field.default)}"


def as_yaml(value: Any) -> str:
    """On one line, as in a file."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    value = getattr(value, "value", value)
    plain = list(value) if isinstance(value, tuple) else value
    if isinstance(plain, float) and plain.is_integer():
        plain = int(plain)
    elif isinstance(plain, dict):
        plain = {
            key: int(each) if float(each).is_integer() else each for key, each in plain.items()
        }
    return str(yaml.safe_dump(plain, default_flow_style=True, width=1 << 20)).split("\n")[0]


def variable_of(name: str) -> str:
    return PREFIX + name.upper()


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping; raises ``BadSettings`` saying what is wrong and where."""
    return read_written(path).values


def read_written(path: Path) -> Written:
    """The same with the lines."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            most = f"{MOST_BYTES >> 10} KiB"
            raise BadSettings(f"{path}: is larger than {most}, which no settings are")
        content = yaml.safe_load(text.decode())
        tree = yaml.compose(text.decode(), yaml.SafeLoader)
    except OSError as err:
        raise BadSettings(f"{path}: cannot be read: {err.strerror}") from err
    except (yaml.YAMLError, ValueError, RecursionError) as err:
        mark = getattr(err, "problem_mark", None)
        at = f":{mark.line + 1}" if mark else ""
        raise BadSettings(f"{path}{at}: is not YAML: {' '.join(str(err).split())}") from err
    if content is None:
        return Written({}, {})
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise BadSettings(f"{path}: must hold a mapping, as in 'policy: pack'")
    lines: dict[_Path, int] = {}
    twice = [*_lines(tree, (), lines, 2)]
    return Written(content, lines, twice)


def said(err: ValidationError) -> str:
    """pydantic's findings on one line: where, what."""
    return "; ".join(
        f"{'.'.join(str(part) for part in finding['loc']) or 'it'}: {finding['msg']}"
        for finding in err.errors()
    )


def _lines(
    node: yaml.Node | None, above: _Path, lines: dict[_Path, int], deep: int
) -> Iterator[tuple[str, int]]:
    """Note the line of each key, so many levels deep; yields those that are there again."""
    if not isinstance(node, yaml.MappingNode) or not deep:
        return
    for key, value in node.value:
        here, line = (*above, str(key.value)), key.start_mark.line + 1
        if here in lines:
            yield ".".join(map(str, here)), line
        lines[here] = line
        yield from _lines(value, here, lines, deep - 1)


def _variables() -> dict[str, None]:
    """All there are, in the order of the settings."""
    names: dict[str, None] = {}
    for name, field in Settings.model_fields.items():
        names[variable_of(name)] = None
        for inner in _fields_of(field):
            names[variable_of(name) + NESTED + inner.upper()] = None
    return names


def _names(above: _Path) -> list[str]:
    if not above:
        return list(Settings.model_fields)
    field = Settings.model_fields.get(str(above[0]))
    return list(_fields_of(field)) if field else []


def _fields_of(field: FieldInfo) -> list[str]:
    kind = field.annotation
    nested = isinstance(kind, type) and issubclass(kind, BaseModel)
    return list(kind.model_fields) if nested else []  # type: ignore[union-attr]


def _over(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Both, and of what both have ``over``'s; a setting of several parts part by part."""
    merged = dict(under)
    for key, value in over.items():
        before = merged.get(key)
        both = isinstance(before, dict) and isinstance(value, Mapping)
        merged[key] = _over(before or {}, value) if both else value
    return merged
