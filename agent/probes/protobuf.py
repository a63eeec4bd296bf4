"""Reads protobuf messages field by field, and writes the few messages that the agent sends.

The agent needs only a few fields of a few messages. Reading them directly is cheaper than using the
protobuf runtime with generated code, and does not depend on the version of either.
"""

from collections.abc import Iterator


class BadMessage(ValueError):
    """The bytes are not a protobuf message, or a field has an unexpected type."""


def fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield (number, value) of each field in order: an int for a varint, otherwise bytes.

    Raises ``BadMessage``.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        match kind:
            case 0:
                value, at = _varint(message, at)
                yield number, value
                continue
            case 1:
                size = 8
            case 2:
                size, at = _varint(message, at)
            case 5:
                size = 4
            case _:
                raise BadMessage(f"unknown wire type {kind}")
        if at + size > len(message):
            raise BadMessage("ends in the middle of a field")
        yield number, message[at : at + size]
        at += size


def message(value: bytes | int) -> bytes:
    """Return the bytes of a field that must not be a number. Raises ``BadMessage``."""
    if isinstance(value, int):
        raise BadMessage("a number instead of a message")
    return value


def text(value: bytes | int) -> str:
    """Return the text of a string field. Raises ``BadMessage``."""
    try:
        return message(value).decode()
    except UnicodeDecodeError as err:
        raise BadMessage("text that is not UTF-8") from err


def field(number: int, value: bytes | str | int) -> bytes:
    """Encode one field. A message is the concatenation of its fields."""
    if isinstance(value, int):
        return _as_varint(number << 3) + _as_varint(value)
    content = value.encode() if isinstance(value, str) else value
    return _as_varint(number << 3 | 2) + _as_varint(len(content)) + content


def _as_varint(value: int) -> bytes:
    """Encode a non-negative number."""
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it. Raises ``BadMessage``."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise BadMessage("ends in the middle of a number")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise BadMessage("a number of more than 64 bits")
