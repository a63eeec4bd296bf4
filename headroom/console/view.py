"""The base of all models of the debug API."""

from functools import cache
from types import NoneType
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict


class View(BaseModel):
    """A model. The docstring below each field describes the field."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    @classmethod
    def of(cls, found: object, **more: Any) -> Self:
        """Return a view with the attributes of ``found`` that the fields name, and with ``more``.

        An empty text becomes null if the field may be null. A field with a default keeps its
        default.
        """
        for name, is_nullable in _fields(cls).items():
            if name not in more:
                value = getattr(found, name)
                more[name] = None if is_nullable and value == "" else value
        return cls.model_validate(more)


@cache
def _fields(view: type[View]) -> dict[str, bool]:
    """Return for each field without a default whether it may be null."""
    required = ((name, f) for name, f in view.model_fields.items() if f.is_required())
    return {name: NoneType in get_args(field.annotation) for name, field in required}
