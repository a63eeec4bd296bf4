"""Reads settings from a file, environment variables and the command line.

For each setting, a flag overrides an environment variable, which overrides the file. Every error
names its source (a line of the file, a variable or a flag) and gives a valid example.
"""

import difflib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from headroom.contract.service_links import service_links
from headroom.errors import BadSettings
from headroom.runtime.settings.constraints import Contradiction
from headroom.runtime.settings.settings import Settings

PREFIX, NESTED = "HEADROOM_", "__"
#: Variables of ``kubectl headroom`` and of the tests, which can be set in a user's shell.
OTHER_VARIABLES = ("HEADROOM_SERVER", "HEADROOM_TOKEN", "HEADROOM_CACHE")
#: Maximum size of a file, which limits parsing time: PyYAML takes quadratic time for a long string,
#: and 16 us for each bracket.
MAX_BYTES = 64 << 10

#: Example values of settings whose default is empty or hard to read.
EXAMPLES = {
    "verbs_host": "127.0.0.1",
    "debug_host": '"::"',
    "debug_tls_cert": "/etc/headroom/tls/tls.crt",
    "debug_tls_key": "/etc/headroom/tls/tls.key",
    "peer_ca": "/etc/headroom/tls/ca.crt",
    "webhook_tls_cert": "/etc/headroom/tls/tls.crt",
    "webhook_tls_key": "/etc/headroom/tls/tls.key",
    "tls_cert": "/etc/headroom/tls/tls.crt",
    "tls_key": "/etc/headroom/tls/tls.key",
    "tls_client_ca": "/etc/headroom/client/ca.crt",
    "extenders": "[headroom-journal.headroom-system.svc]",
    "max_body": "16Mi",
    "gpu_hour_price": "2.50",
    "evict_partial_groups_after_s": "60",
    "grafana_url": "https://grafana.example/d/gpus?var-node={node}&var-gpu={uuid}&from={from_ms}",
    "largest_devices": "[nvidia.com/gpu=80Gi]",
    "gate_image": "registry.example/headroom-agent:1.0",
    "journal_bytes": "16Mi",
    "prometheus_url": "https://prometheus.monitoring:9090",
    "prometheus_matchers": "'cluster=\"eu-1\"'",
    "prometheus_token_file": "/etc/headroom/prometheus/token",
    "prometheus_ca": "/etc/headroom/prometheus/ca.crt",
}

_Location = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """An error. ``where`` is, for example, headroom.yaml:12, $HEADROOM_POLICY or --verbs-port."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass(frozen=True, slots=True)
class ParsedFile:
    """The content of a YAML file that contains a mapping, and the line of each key."""

    values: dict[str, Any]
    lines: Mapping[_Location, int]
    #: Keys that occur more than once, with the line of each repetition.
    repeated: Sequence[tuple[str, int]] = ()


class _Environment(EnvSettingsSource):
    """Settings from environment variables. Lists are comma-separated or JSON."""

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
                return text  # validation rejects it later
        return [part.strip() for part in text.split(",") if part.strip()]


class _Variables(Settings, BaseSettings):
    """Describes the settings as environment variables. It is never instantiated."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter=NESTED)


def load_settings(
    path: Path | None, env: Mapping[str, str] | None = None, **overrides: Any
) -> Settings:
    """Return the settings from the file, from ``env``, and from the overrides that are not None.

    ``env`` defaults to the environment of the process. Raises ``BadSettings`` with one line for
    each problem."""
    settings, problems = check_settings(path, os.environ if env is None else env, overrides)
    if settings is None:
        raise BadSettings("\n".join(map(str, problems)))
    return settings


def check_settings(
    path: Path | None, env: Mapping[str, str], overrides: Mapping[str, Any]
) -> tuple[Settings | None, list[Problem]]:
    """Read and validate settings without raising.

    Return the settings and no problems, or None and all problems.
    """
    where = path or "settings"
    try:
        parsed = _parse(path) if path else ParsedFile({}, {})
    except BadSettings as err:
        return None, [Problem(*str(err).split(": ", 1))]
    problems = [
        Problem(f"{where}:{line}", f"{key} is set twice; remove one of the lines")
        for key, line in parsed.repeated
    ]
    env = {name: value for name, value in env.items() if name.startswith(PREFIX)}
    known = _variables()
    links = service_links(env)
    for name in sorted(env.keys() - known.keys() - set(OTHER_VARIABLES) - links):
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]}?" if close else "see docs/reference/settings.md"
        problems.append(Problem(f"${name}", f"is not a setting; {hint}"))
    env = {name: value for name, value in env.items() if name in known and name not in links}
    flags = {name: value for name, value in overrides.items() if value is not None}
    values = _merged(_merged(parsed.values, _Environment(env)() if env else {}), flags)

    def sources(loc: _Location) -> Iterator[str]:
        """Yield the sources that set the value, highest priority first."""
        name = str(loc[0])
        if name in flags:
            yield "--" + name.replace("_", "-")
        for variable in (PREFIX + NESTED.join(map(str, loc)).upper(), PREFIX + name.upper()):
            if variable in env:
                yield f"${variable}"
        for length in range(len(loc), 0, -1):
            if loc[:length] in parsed.lines:
                yield f"{where}:{parsed.lines[loc[:length]]}"

    def source(loc: _Location) -> str:
        return next(sources(loc), str(where)) if loc else str(where)

    try:
        settings = Settings(**values)
    except ValidationError as err:
        problems += [_problem(finding, source) for finding in err.errors()]
        return None, problems
    return (None if problems else settings), problems


def _problem(finding: Any, source: Callable[[_Location], str]) -> Problem:
    """Convert an error of pydantic. ``source`` returns where a value was set."""
    loc: _Location = finding["loc"]
    name, message = ".".join(map(str, loc)), str(finding["msg"]).removeprefix("Value error, ")
    cause = (finding.get("ctx") or {}).get("error")
    if isinstance(cause, Contradiction):
        involved = dict.fromkeys(source((each,)) for each in cause.settings)
        return Problem(", ".join(involved), message)
    if finding["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(loc[-1]), _names(loc[:-1]), 1)
        hint = f"did you mean {close[0]}?" if close else "see docs/reference/settings.md"
        return Problem(source(loc), f"{name} is not a setting; {hint}")
    if loc and "Example" not in message and (example := example_of(loc)):
        message += f". Example: {example}"
    return Problem(source(loc), f"{name}: {message}" if loc else message)


def example_of(loc: _Location) -> str:
    """Return a valid line of YAML for the setting, or "" if there is no example."""
    name = str(loc[0])
    if name in EXAMPLES:
        return f"{name}: {EXAMPLES[name]}"
    field = Settings.model_fields.get(name)
    return "" if field is None or field.default is None else f"{name}: {as_yaml(field.default)}"


def as_yaml(value: Any) -> str:
    """Return the value of a setting as one line of YAML."""
    text: str = yaml.safe_dump(_plain(value), default_flow_style=True, width=1 << 20)
    return text.split("\n")[0]


def _plain(value: Any) -> Any:
    """Return a value as types of YAML, with whole numbers as integers."""
    if isinstance(value, BaseModel):
        return {name: _plain(part) for name, part in value}
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return getattr(value, "value", value)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that contains a mapping. Raises ``BadSettings`` with the line of the
    error."""
    return _parse(path).values


def _parse(path: Path) -> ParsedFile:
    """Read a YAML file that contains a mapping, with the line of each key. Raises
    ``BadSettings``."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise BadSettings(f"{path}: is larger than {MAX_BYTES >> 10} KiB, the maximum size")
        content = yaml.safe_load(text.decode())
        tree = yaml.compose(text.decode(), yaml.SafeLoader)
    except OSError as err:
        raise BadSettings(f"{path}: cannot be read: {err.strerror}") from err
    except (yaml.YAMLError, ValueError, RecursionError) as err:
        mark = getattr(err, "problem_mark", None)
        at = f":{mark.line + 1}" if mark else ""
        raise BadSettings(f"{path}{at}: is not YAML: {' '.join(str(err).split())}") from err
    if content is None:
        return ParsedFile({}, {})
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise BadSettings(f"{path}: must contain a mapping, as in 'policy: pack'")
    lines: dict[_Location, int] = {}
    repeated = [*_lines(tree, (), lines, 2)]
    return ParsedFile(content, lines, repeated)


def _lines(
    node: yaml.Node | None, parent: _Location, lines: dict[_Location, int], depth: int
) -> Iterator[tuple[str, int]]:
    """Add the line of each key down to ``depth`` levels. Yield keys that occur more than once."""
    if not isinstance(node, yaml.MappingNode) or not depth:
        return
    for key, value in node.value:
        path, line = (*parent, str(key.value)), key.start_mark.line + 1
        if path in lines:
            yield ".".join(map(str, path)), line
        lines[path] = line
        yield from _lines(value, path, lines, depth - 1)


def _variables() -> dict[str, None]:
    """Return the names of all variables as keys, in the order of the settings."""
    names: dict[str, None] = {}
    for name, field in Settings.model_fields.items():
        variable = PREFIX + name.upper()
        names[variable] = None
        names |= {f"{variable}{NESTED}{inner.upper()}": None for inner in _fields_of(field)}
    return names


def _names(parent: _Location) -> list[str]:
    """Return the names of all settings, or of the parts of setting ``parent``."""
    if not parent:
        return list(Settings.model_fields)
    field = Settings.model_fields.get(str(parent[0]))
    return list(_fields_of(field)) if field else []


def _fields_of(field: FieldInfo) -> list[str]:
    kind = field.annotation
    nested = isinstance(kind, type) and issubclass(kind, BaseModel)
    return list(kind.model_fields) if nested else []  # type: ignore[union-attr]


def _merged(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the values of ``override``. Nested mappings are merged key by key."""
    merged = dict(base)
    for key, value in override.items():
        before = merged.get(key)
        both = isinstance(before, dict) and isinstance(value, Mapping)
        merged[key] = _merged(before or {}, value) if both else value
    return merged
