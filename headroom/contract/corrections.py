"""Corrects usual mistakes in amounts of memory, for the examples in errors."""

import re
from collections.abc import Callable, Iterator

from headroom.contract.errors import BadAnnotation

#: Longer values are not corrected.
MAX_CHARS = 256
_COMMA = re.compile(r"^(\d+),(\d+)(?=\s*[a-zA-Z%])")
_SPACE = re.compile(r"(?<=\d)\s+(?=[a-zA-Z%])")
_UNIT = re.compile(r"(?<=\d)([kmgtKMGT])([iI]?)[bB]?(?![a-zA-Z])")
_AUTO = re.compile(r"^\s*auto\b[\s,]*", re.IGNORECASE)
_COLON = re.compile(r"^([a-z0-9][-a-z0-9]*)\s*:\s*(?=\d)")


def with_example(
    err: BadAnnotation, text: str, is_valid: Callable[[str, str], bool]
) -> BadAnnotation:
    """Return the error with what the author probably meant as its example, or the same error if no
    correction is valid.

    ``is_valid`` returns whether a text is valid for a key.
    """
    if len(text) > MAX_CHARS:
        return err
    found = (each for each in _candidates(text.strip()) if each != text and is_valid(each, err.key))
    example = next(found, None)
    return BadAnnotation(err.key, err.value, err.why, example) if example else err


def _candidates(text: str) -> Iterator[str]:
    """Yield corrections. ``8GB`` becomes 8Gi first, because GPUs are sold with powers of two."""
    yield text
    text = _SPACE.sub("", _COMMA.sub(r"\1.\2", text))
    text = _COLON.sub(r"\1=", text).strip(",; ")
    yield text
    if (auto := _AUTO.match(text)) is not None:
        rest = re.sub(r"\s*[,;\s]\s*", ",", text[auto.end() :])
        text = f"auto,{rest}" if rest else "auto"
    yield text
    yield _UNIT.sub(lambda unit: f"{unit[1].upper()}i", text)
