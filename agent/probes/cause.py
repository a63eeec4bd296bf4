"""A message with a code: the text is for users and the code for programs."""

from collections.abc import Iterable

from headroom.contract.gpunode import HealthCode, SourceCode


class Cause(str):
    """Why something is unhealthy or cannot be read.

    It is a string, because probes join and compare messages. A string that is built from a
    ``Cause``, for example with an f-string, has no code unless it is converted to a ``Cause``
    again.
    """

    __slots__ = ("code",)

    def __new__(cls, text: str, code: HealthCode | SourceCode) -> "Cause":
        made = super().__new__(cls, text)
        made.code = code
        return made

    code: HealthCode | SourceCode


def code_of(text: str) -> str:
    """Return the code of a message, or an empty string if it has none."""
    return text.code if isinstance(text, Cause) else ""


def joined(texts: Iterable[str]) -> str:
    """Join messages about one source. The result has the first code that a message has, if any."""
    listed = [*texts]
    whole = "; ".join(listed)
    coded = (text.code for text in listed if isinstance(text, Cause))
    return next((Cause(whole, code) for code in coded), whole)
