"""The form of times in answers."""

from datetime import UTC, datetime
from typing import Annotated

from pydantic import PlainSerializer, WithJsonSchema

from headroom.contract.timestamps import age


def whole_second(text: str) -> str:
    """Return an RFC 3339 time in UTC, in whole seconds and with Z, as Kubernetes writes times.

    A text that is not a time is returned unchanged.
    """
    if text[10:11] == "T" and (text.endswith(("+00:00", "Z"))):
        return f"{text[:19]}Z"
    at_s = age(text, 0.0)
    try:
        return text if at_s is None else f"{datetime.fromtimestamp(-at_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
    except (ValueError, OverflowError):  # in UTC, the year is below 1 or above 9999
        return text


#: A time, which is sent in whole seconds. Within the process it keeps its fraction, by which lists
#: are sorted.
Time = Annotated[
    str,
    PlainSerializer(whole_second, return_type=str),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
