"""Copies the comments above the fields of bodies into /openapi.json as their descriptions."""

import inspect
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel

_COMMENT = re.compile(r"^    #: (.*)$")
_FIELD = re.compile(r"^    (\w+):")


def describe_fields(schemas: dict[str, Any]) -> None:
    """Add missing descriptions to schemas that have the name of one of our models."""
    models = {model.__name__: model for model in _models(BaseModel)}
    for name, schema in schemas.items():
        model = models.get(name)
        if model is None:
            continue
        aliases = {key: field.serialization_alias for key, field in model.model_fields.items()}
        for field, text in _meanings(model).items():
            described = schema.get("properties", {}).get(aliases.get(field) or field)
            if described is not None:
                described.setdefault("description", text)


def _models(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in base.__subclasses__():
        if model.__module__.startswith("extender.console"):
            yield model
        yield from _models(model)


@cache
def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return field -> the comment above it, including fields of base classes."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, BaseModel) or not base.__module__.startswith("extender.console"):
            continue
        lines: list[str] = []
        for line in inspect.getsource(base).splitlines():
            if comment := _COMMENT.match(line):
                lines.append(comment[1])
                continue
            if (field := _FIELD.match(line)) and lines:
                found[field[1]] = " ".join(lines)
            lines = []
    return found
