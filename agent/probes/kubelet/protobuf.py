"""Reads protobuf messages field by field, and writes the few that the agent sends.

The agent knows a handful of messages and a few fields of each; that is cheaper than the protobuf
runtime and generated code, and cannot break with their versions.
"""

from collections.abc import Iterator


class BadMessage(ValueError):
    """Not a protobuf message, or one in which a field is not what it should be."""


def fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """(number, value) of each field as it comes: bytes where it has a length, else a number."""
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
    if isinstance(value, int):
        raise BadMessage("a number where a message should be")
    return value


def text(value: bytes | int) -> str:
    try:
        return message(value).decode()
    except UnicodeDecodeError as err:
        raise BadMessage("text that is not UTF-8") from err


def field(number: int, value: bytes | str | int) -> bytes:
    """One field as it is written; a message is its fields one after the other."""
    if isinstance(value, int):
        return _as_varint(number << 3) + _as_varint(value)
    content = value.encode() if isinstance(value, str) else value
    return _as_varint(number << 3 | 2) + _as_varint(len(content)) + content


def _as_varint(value: int) -> bytes:
    """Of a number that is not negative."""
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _varint(message: bytes, at: int) -> tuple[int, int]:
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
