"""Computes a digest of all attributes of a state. Any change of the state changes the digest."""

import hashlib
from collections.abc import Iterator
from enum import Enum
from typing import Any

import msgspec
import numpy as np

#: Attributes that are not digested, because they cache values that are computed from other
#: attributes.
_KEPT_FOR_LATER = {"_latest", "_columns_shown", "_per_node_shown", "_generation", "_parsed"}


def digest(of: object) -> str:
    taken = hashlib.sha256()
    for piece in _pieces(of, set()):
        taken.update(piece.encode() + b"\0")
    return taken.hexdigest()


def _pieces(of: Any, within: set[int]) -> Iterator[str]:
    yield type(of).__name__
    if of is None or isinstance(of, str | int | float | bytes | Enum):
        yield repr(of)
    elif isinstance(of, np.ndarray):
        yield f"{of.dtype}{of.shape}{of.tolist()}"
    elif isinstance(of, set | frozenset):
        yield from sorted(digest(each) for each in of)
    elif id(of) in within:
        yield "itself"
    else:
        within = within | {id(of)}
        for key, value in _parts(of):
            yield key if isinstance(key, str) else repr(key)
            yield from _pieces(value, within)


def _parts(of: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(of, dict):
        yield from of.items()
    elif isinstance(of, list | tuple):
        yield from enumerate(of)
    elif isinstance(of, msgspec.Struct):
        yield from ((name, getattr(of, name)) for name in of.__struct_fields__)
    else:
        names = [*getattr(of, "__dict__", ()), *_slots(type(of))]
        yield from ((name, getattr(of, name)) for name in names if name not in _KEPT_FOR_LATER)


def _slots(kind: type) -> list[str]:
    return [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
