"""The part of the chart's values.schema.json that describes the settings."""

import json
import re
from collections.abc import Mapping
from typing import Any

from headroom.runtime.settings.settings import Settings
from reference.markdown import ROOT
from release.chart import CHART

PATH = ROOT / CHART / "values.schema.json"
#: The object at ``properties.settings`` of the file.
_SETTINGS = re.compile(r'^    "settings": \{\n.*?^    \}', re.MULTILINE | re.DOTALL)
#: Keywords of pydantic that Helm's validation does not need.
_LEFT_OUT = ("title", "description", "default", "format")


def text() -> str:
    """Return the chart's schema, in which each setting has the type that Headroom accepts.

    So Helm rejects a misspelled setting, which pods would reject only after they are created.
    """
    schema = Settings.model_json_schema()
    definitions = schema["$defs"]
    lines = ",\n".join(
        f"        {json.dumps(name)}: {json.dumps(_with_types(_resolved(setting, definitions)))}"
        for name, setting in schema["properties"].items()
    )
    before = PATH.read_text(encoding="utf-8")
    description = json.loads(before)["properties"]["settings"]["description"]
    settings = (
        '    "settings": {\n'
        f'      "description": {json.dumps(description)},\n'
        '      "type": "object",\n'
        '      "additionalProperties": false,\n'
        '      "properties": {\n'
        f"{lines}\n"
        "      }\n"
        "    }"
    )
    return _SETTINGS.sub(lambda _: settings, before, count=1)


def _resolved(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Return the schema without references, and without the keywords in ``_LEFT_OUT``."""
    if isinstance(schema, list):
        return [_resolved(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if reference := schema.get("$ref", "").rpartition("/")[2]:
        return _resolved(definitions[reference], definitions)
    found = {k: v for k, v in schema.items() if k not in (*_LEFT_OUT, "properties")}
    found = {key: _resolved(value, definitions) for key, value in found.items()}
    if properties := schema.get("properties"):
        found["properties"] = {
            name: _with_types(_resolved(each, definitions)) for name, each in properties.items()
        }
    return found


def _with_types(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a setting with a list of types instead of ``anyOf``.

    Helm's message about ``anyOf`` lists every alternative; about types, it is one line.
    """
    found: dict[str, Any] = {}
    types: list[str] = []
    for choice in schema.get("anyOf", [schema]):
        types += [choice["type"]] if choice["type"] not in types else []
        found |= choice
    return found | {"type": types if len(types) > 1 else types[0]}
