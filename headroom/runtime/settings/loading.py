"""Reads settings from files, environment variables and the command line.

For each setting, a flag overrides an environment variable, which overrides the files. Every error
names its source (a line of a file, a variable or a flag) and gives a valid example.
"""

import difflib
import json
import os
from collections.abc import Callable, Iterator, Mapping
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
from headroom.runtime.settings.settings_files import (
    Location,
    ParsedSettings,
    merged,
    read_settings,
)

PREFIX, NESTED = "HEADROOM_", "__"
#: Variables of ``kubectl headroom`` and of the tests, which can be set in a user's shell.
OTHER_VARIABLES = ("HEADROOM_SERVER", "HEADROOM_TOKEN", "HEADROOM_CACHE")

#: Example values of settings whose default is empty or hard to read.
EXAMPLES = {
    "mode": "observe",
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
    "grafana_url": "https://grafana.example/d/headroom?var-node={node}&var-namespace={namespace}",
    "largest_devices": "[nvidia.com/gpu=80Gi]",
    "gate_image": "registry.example/headroom-agent:1.0",
    "journal_bytes": "16Mi",
    "prometheus_url": "https://prometheus.monitoring:9090",
    "prometheus_matchers": "'cluster=\"eu-1\"'",
    "prometheus_token_file": "/etc/headroom/prometheus/token",
    "prometheus_ca": "/etc/headroom/prometheus/ca.crt",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """An error in the settings. ``where`` is its place, such as headroom.yaml:12, $HEADROOM_POLICY
    or --verbs-port."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


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
    """Describes the settings as environment variables. This class is never instantiated."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter=NESTED)


def load_settings(
    path: Path | None, env: Mapping[str, str] | None = None, **overrides: Any
) -> Settings:
    """Return the settings from a file or folder, from ``env``, and from the overrides that are not
    None.

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
        parsed = read_settings(path) if path else ParsedSettings({}, {})
    except BadSettings as err:
        return None, [Problem(*str(err).split(": ", 1))]
    problems = [
        Problem(place, f"{key} is set twice; remove one of the lines")
        for key, place in parsed.repeated
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
    values = merged(merged(parsed.values, _Environment(env)() if env else {}), flags)

    def sources(loc: Location) -> Iterator[str]:
        """Yield the sources that set the value, highest priority first."""
        name = str(loc[0])
        if name in flags:
            yield "--" + name.replace("_", "-")
        for variable in (PREFIX + NESTED.join(map(str, loc)).upper(), PREFIX + name.upper()):
            if variable in env:
                yield f"${variable}"
        for length in range(len(loc), 0, -1):
            if loc[:length] in parsed.places:
                yield parsed.places[loc[:length]]

    def source(loc: Location) -> str:
        return next(sources(loc), str(where)) if loc else str(where)

    try:
        settings = Settings(**values)
    except ValidationError as err:
        problems += [_problem(finding, source) for finding in err.errors()]
        return None, sorted(problems, key=_by_line)
    return (None if problems else settings), problems


def _by_line(problem: Problem) -> tuple[str, int]:
    """Return a sort key: the order in which a reader of the files finds the problems."""
    file, _, line = problem.where.partition(", ")[0].rpartition(":")
    return (file, int(line)) if line.isdigit() else (problem.where, 0)


def _problem(finding: Any, source: Callable[[Location], str]) -> Problem:
    """Convert an error of pydantic. ``source`` returns where a value was set."""
    loc: Location = finding["loc"]
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


def example_of(loc: Location) -> str:
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
    """Convert a value to types that YAML has. Whole numbers become integers."""
    if isinstance(value, BaseModel):
        return {name: _plain(part) for name, part in value}
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return getattr(value, "value", value)


def _variables() -> dict[str, None]:
    """Return the names of all variables as keys, in the order of the settings."""
    names: dict[str, None] = {}
    for name, field in Settings.model_fields.items():
        variable = PREFIX + name.upper()
        names[variable] = None
        names |= {f"{variable}{NESTED}{inner.upper()}": None for inner in _fields_of(field)}
    return names


def _names(parent: Location) -> list[str]:
    """Return the names of all settings, or of the parts of setting ``parent``."""
    if not parent:
        return list(Settings.model_fields)
    field = Settings.model_fields.get(str(parent[0]))
    return list(_fields_of(field)) if field else []


def _fields_of(field: FieldInfo) -> list[str]:
    kind = field.annotation
    nested = isinstance(kind, type) and issubclass(kind, BaseModel)
    return list(kind.model_fields) if nested else []  # type: ignore[union-attr]
