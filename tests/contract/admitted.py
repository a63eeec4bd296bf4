"""Draws random objects that the schema of a CRD permits, including unusual objects."""

from random import Random
from typing import Any

import jsonschema_rs

Schema = dict[str, Any]

#: Candidate values for text fields. The schema of each field permits some of them.
_TEXTS = (
    *("", "a", "main", "team", "GPU-a", "MIG-0", "u1", "L4", "nvidia.com/gpu", "ReplicaSet", "p1"),
    *("Deployment", "apps/v1", "web; touch /tmp/x", "$(id)", "-rf", "--", "..", "a/b", "=1+1", '"'),
    *("2026-11-21T00:00:00Z", "2026-11-21T00:00:00.5+05:30", "0001-01-01T00:00:00+14:00"),
    *("9999-12-31T23:59:59-23:00", "1000-01-01T00:00:00Z", "2026-99-99T99:99:99Z", "1969-12-31"),
    *("2999-12-31T23:59:59Z", "2026-11-21T::Z", "\u202ea", "\u200b", "💥", "é", "x" * 10_000),
    *("GPU-a::0", "reserved", "adopted", "evicted", "steered", "%s", "{}", "<b>", "null", "NaN"),
)
#: Keys of maps. The schema does not restrict keys.
_KEYS = (
    "",
    "u1",
    "GPU-a",
    "GPU-b",
    "0",
    "5",
    "500",
    "0500",
    "1120",
    "1121",
    "-1",
    "\uff11\uff12",
    "1e3",
)
_ODD_KEYS = "9" * 5000, "\x1b[2J", "a\nb", "\u202e"


def drawn(schema: Schema, random: Random) -> Any:
    """Return a value that the schema permits. ``random`` chooses small values and the limits of the
    schema.
    """
    match schema["type"]:
        case "object" if "additionalProperties" in schema:
            keys = random.sample(_KEYS + _ODD_KEYS, random.choice((0, 1, 2, 4)))
            return {key: drawn(schema["additionalProperties"], random) for key in keys}
        case "object":
            required = schema.get("required", ())
            return {
                name: drawn(each, random)
                for name, each in schema.get("properties", {}).items()
                if name in required or random.random() < 0.8
            }
        case "array":
            return [drawn(schema["items"], random) for _ in range(random.choice((0, 1, 1, 2, 3)))]
        case "string":
            return _text(schema, random)
        case "boolean":
            return random.choice((False, True))
    low, high = schema.get("minimum", -(1 << 63)), schema.get("maximum", (1 << 63) - 1)
    if schema["type"] == "number":
        return random.choice((low, high, random.uniform(low, high), 5e-324))
    numbers = low, high, low + 1, high - 1, 0, 1, 2, 1000, 8 << 30, random.randint(low, high)
    return random.choice([number for number in numbers if low <= number <= high])


def _text(schema: Schema, random: Random) -> str:
    if "enum" in schema:
        return str(random.choice(schema["enum"]))
    most = schema.get("maxLength", 100)
    formats = schema.get("format") == "date-time"
    admits = jsonschema_rs.Draft7Validator(schema, validate_formats=formats)
    texts = [text for each in _TEXTS if admits.is_valid(text := each[:most])]
    return random.choice(texts)
