"""Describes values that pydantic rejects, in the words of people who write requests."""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

#: Maximum length of a quoted value.
_MOST_CHARS = 80
_Context = Mapping[str, Any]
#: Sentences about a value by the type of the error. They follow the quoted value.
_ABOUT: dict[str, Callable[[_Context], str]] = {
    "int_parsing": lambda _: "is not a whole number",
    "int_type": lambda _: "is not a whole number",
    "int_from_float": lambda _: "is not a whole number",
    "int_parsing_size": lambda _: "is too large",
    "float_parsing": lambda _: "is not a number",
    "float_type": lambda _: "is not a number",
    "finite_number": lambda _: "is not a finite number",
    "bool_parsing": lambda _: "is not true or false",
    "bool_type": lambda _: "is not true or false",
    "string_type": lambda _: "is not text",
    "string_pattern_mismatch": lambda _: "does not have the form of the example",
    "string_too_long": lambda c: f"is longer than {c['max_length']} characters",
    "string_too_short": lambda c: f"is shorter than {c['min_length']} characters",
    "greater_than_equal": lambda c: f"is less than {c['ge']:g}, the minimum",
    "greater_than": lambda c: f"is not more than {c['gt']:g}",
    "less_than_equal": lambda c: f"is more than {c['le']:g}, the maximum",
    "less_than": lambda c: f"is not less than {c['lt']:g}",
    "literal_error": lambda c: f"is not {c['expected']}",
    "enum": lambda c: f"is not {c['expected']}",
    "dict_type": lambda _: "is not an object",
    "model_type": lambda _: "is not an object",
    "model_attributes_type": lambda _: "is not an object",
    "list_type": lambda _: "is not a list",
}


def sentence_of(finding: Mapping[str, Any], fields: Sequence[str] = ()) -> str:
    """Describe an error of pydantic. ``fields`` are names that an unknown field could have meant.

    An error of another type keeps the words of pydantic.
    """
    kind, context = finding["type"], finding.get("ctx") or {}
    if kind == "missing":
        return "it is required"
    if kind == "extra_forbidden":
        near = get_close_matches(str(finding["loc"][-1]), fields, 1)
        return f"there is no such field{f'; did you mean {near[0]}?' if near else ''}"
    if kind == "json_invalid":
        return f"the body is not JSON: {context.get('error', finding['msg'])}"
    if (about := _ABOUT.get(kind)) is None:
        return f"{finding['msg']}, not {str(finding['input'])[:_MOST_CHARS]!r}"
    return f"{str(finding['input'])[:_MOST_CHARS]!r} {about(context)}"
