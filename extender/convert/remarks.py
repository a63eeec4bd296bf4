"""What is said about a conversion: where, and whether the result can be used as it is."""

from dataclasses import dataclass
from enum import Enum


class Weight(Enum):
    #: Carried over; what it means has changed a little.
    CHANGED = "changed"
    #: Has no counterpart here, and was taken out or does nothing any more.
    LOST = "lost"
    #: Somebody has to look: what stands there was left as it was.
    NOT_UNDERSTOOD = "not understood"


@dataclass(frozen=True, slots=True)
class Finding:
    weight: Weight
    #: In the file, from 1; None where the thing has no line of its own.
    line: int | None
    #: Kind and name, as in "Deployment web".
    where: str
    message: str


class BadManifest(ValueError):
    """A file that cannot be converted at all; the message says where and what would be right."""
