"""The base of all models of the debug API."""

from pydantic import BaseModel, ConfigDict


class View(BaseModel):
    """Describes each field by the docstring below it, and can be read from an object's
    attributes."""

    model_config = ConfigDict(use_attribute_docstrings=True, from_attributes=True)
