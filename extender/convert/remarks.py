"""The findings of a conversion."""

from dataclasses import dataclass
from enum import Enum


class Weight(Enum):
    #: Converted, with a slightly different meaning.
    CHANGED = "changed"
    #: Headroom has no equivalent: it was removed or has no effect.
    LOST = "lost"
    #: Not changed; a person must convert it.
    NOT_UNDERSTOOD = "not understood"


@dataclass(frozen=True, slots=True)
class Finding:
    weight: Weight
    #: Line in the file, from 1; None if there is no single line.
    line: int | None
    #: Kind and name, such as "Deployment web".
    where: str
    message: str


class BadManifest(ValueError):
    """A file that cannot be converted; the message names the place and the fix."""
