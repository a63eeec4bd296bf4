"""Findings: the messages of a conversion to the user."""

from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """The result of the conversion for the part of the manifest that a finding describes."""

    #: The setting was converted to a setting with a slightly different meaning.
    CHANGED = "changed"
    #: The setting was removed, or stays but has no effect, because Headroom has no equivalent.
    LOST = "lost"
    #: The setting was not changed, so a person must convert it.
    NOT_UNDERSTOOD = "not understood"


@dataclass(frozen=True, slots=True)
class Finding:
    """A message to the user about one part of a manifest."""

    outcome: Outcome
    #: Line in the file, from 1; None if the finding is about more than one line.
    line: int | None
    #: Kind and name, such as "Deployment web".
    where: str
    message: str


def several_devices(container: str, devices: int) -> str:
    """Return the message about a container that requests several devices."""
    return (
        f"container {container}: {devices} devices; if GPUs are shared, the container can get two "
        "replicas of one device"
    )
