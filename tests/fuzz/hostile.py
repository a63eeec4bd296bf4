"""Makes hostile inputs of sound ones: one place of the tree at a time, or byte by byte.

A tree is a value of ``json.loads``. Content that JSON cannot express, or can express in several
ways, is inserted as raw text. The same seed produces the same inputs on every machine.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import msgspec

Path = tuple[str | int, ...]

encode = msgspec.json.Encoder().encode


def raw(text: bytes) -> msgspec.Raw:
    return msgspec.Raw(text)


#: Written as they stand. Some are no JSON at all, some are JSON that decoders disagree about.
RAW = [
    b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400", b"1e-400", b"-0", b"0.1", b"1E2",
    b"9" * 30, b"-" + b"9" * 30, b"9" * 5000, b"00", b"0x10", b"+1", b".5", b"1.", b"tru", b"nul",
    b"undefined", b"'x'", b"", b" ", b",", b"[,]", b"{,}", b"{\"a\"}", b"[1,]", b"/* x */ 1",
    b'"\\ud800"', b'"\\udfff\\ud800"', b'"\\u0000"', b'"\\ud83d\\ude00"', b'"\xff\xfe"',
    b'"\xc0\x80"', b'"\xed\xa0\x80"', b'"\\x"', b'"\x00"', b'"\x1f"', b"\xef\xbb\xbf1",
    b'"' + b"a" * 5000 + b'"', b"[" * 200 + b"]" * 200, b"[" * 2000 + b"]" * 2000,
    b'{"a":' * 1500 + b"1" + b"}" * 1500, b"[" * 3000,
]  # fmt: skip

#: Any of them may stand in any place.
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 255, 65535, 65536, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 44,
    (1 << 44) + 1, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, -(1 << 63), (1 << 64) - 1, 1 << 64,
    0.5, -0.5, 1.5, 1e18, 1e308, "", " ", "0", "-1", "1", "a", "x" * 300, "x" * 70_000, "%s%n%d",
    "../../etc/passwd", "a/b?c=d#e", "\u0000", "\u202e", "\U0001f600", "٣", "٨Gi", "1_000", "1e9",
    "Infinity", "nan", "null", "true", "\n", "\r\n\r\nHTTP/1.1 200 OK", "<script>",
    [], {}, [[]], [None], [{}], {"": ""}, {"a": None}, [1, "a", None, {}],
]  # fmt: skip

#: Texts where the contract reads a text: quantities, annotations, stamps, names.
TEXTS = [
    "8Gi", "1Mi", "80Gi", "0", "0Gi", "-8Gi", "8", "8G", "8.5Gi", "0.0001", "1e3", "1E", "16Ei",
    "9" * 20, "9" * 64, "9" * 65, "9" * 5000, "1e-999999999", "1e999999999", "Gi", "-", ".", "8 Gi",
    "25%", "0%", "100%", "100.0001%", "101%", "1.23456%", "-1%", "%", "main=8Gi,main=1Gi",
    "main=8Gi,cache=2Gi", "main=", "=8Gi", ",", "=", "main=8Gi" + ",a=1Gi" * 3000, "8Gi\u0000",
    "pack", "spread", "fragmentation", "predicted", "any", "gated", "steered", "pinned", "PACK",
    "70%", "1024", "1025", "0001", "99999", "Always", "Succeeded", "Failed", "Running", "Pending",
    "1970-01-01T00:00:00Z", "9999-12-31T23:59:59.999999-23:59", "0001-01-01T00:00:00+23:59",
    "0001-01-01", "2026-13-45T99:99:99Z", "20260101T000000Z", "2026-W01-1", "2026-11-21T00:00:00",
    "all", "none", "void", "void,GPU-0", "0,1,2", "GPU-a", "GPU-b", "all,none",
    "tesla-" + "9" * 5000 + "gb", "nvidia-h100-80gb", "time-slicing", "time-sharing", "mps",
    "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb", "nvidia.com/mig-",
    "metadata.annotations['headroom.gpu/devices.0']", "NVIDIA_VISIBLE_DEVICES", "headroom-gate",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Seed:
    """One sound input, and every place in it."""

    tree: Any
    paths: tuple[Path, ...]

    @classmethod
    def of(cls, tree: Any) -> "Seed":
        return cls(tree, tuple(_paths(tree)))


def _paths(tree: Any, here: Path = ()) -> Iterator[Path]:
    yield here
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _paths(value, (*here, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _paths(value, (*here, index))


def mutated(seed: Seed, random: Random, others: list[Seed]) -> Any:
    """``seed`` with some of its places changed; what is not changed is shared with it."""
    tree = seed.tree
    for _ in range(random.choice((1, 1, 1, 2, 3, 6))):
        change = partial(random.choice(_CHANGES), random=random, others=others)
        tree = replaced(tree, random.choice(seed.paths), change)
    return tree


def replaced(tree: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """A copy of the tree with another value at ``path``; the tree itself where there is none."""
    if not path:
        return change(tree)
    key, *rest = path
    if isinstance(tree, dict) and key in tree:
        return {**tree, key: replaced(tree[key], tuple(rest), change)}
    if isinstance(tree, list) and isinstance(key, int) and key < len(tree):
        return [*tree[:key], replaced(tree[key], tuple(rest), change), *tree[key + 1 :]]
    return tree


def _value(old: Any, random: Random, others: list[Seed]) -> Any:
    return random.choice(VALUES)


def _raw(old: Any, random: Random, others: list[Seed]) -> Any:
    return raw(random.choice(RAW))


def _text(old: Any, random: Random, others: list[Seed]) -> Any:
    return random.choice(TEXTS)


def _number(old: Any, random: Random, others: list[Seed]) -> Any:
    if isinstance(old, int):
        return random.choice((-old, old + 1, old - 1, old << random.randrange(70), old * 10**25))
    return random.getrandbits(random.randrange(1, 90)) * random.choice((1, -1))


def _edited(old: Any, random: Random, others: list[Seed]) -> Any:
    if not isinstance(old, str) or not old:
        return random.choice(TEXTS)
    at = random.randrange(len(old))
    put = random.choice(("", "\u0000", "%", '"', "\\", "é", "\U0001f600", ",", "=", "/", "9", " "))
    return random.choice((old[:at] + put + old[at + 1 :], old + old, old[:at], old.upper()))


def _without(old: Any, random: Random, others: list[Seed]) -> Any:
    if isinstance(old, dict) and old:
        gone = random.choice(list(old))
        return {key: value for key, value in old.items() if key != gone}
    if isinstance(old, list) and old:
        at = random.randrange(len(old))
        return old[:at] + old[at + 1 :]
    return None


def _more(old: Any, random: Random, others: list[Seed]) -> Any:
    """More of what is there, now and then very much more."""
    times = random.choice((2, 2, 2, 3, 10, 40, 300))
    if isinstance(old, list):
        return old * times
    if isinstance(old, dict):
        extra = {f"extra-{index}": random.choice(VALUES) for index in range(times)}
        return {**old, **extra}
    return [old] * times


def _wrapped(old: Any, random: Random, others: list[Seed]) -> Any:
    return random.choice(([old], {"x": old}, [[old]], {"metadata": old}))


def _twice(old: Any, random: Random, others: list[Seed]) -> Any:
    """A key that comes twice."""
    if not isinstance(old, dict) or not old:
        return old
    key = random.choice(list(old))
    value = encode(random.choice(VALUES))
    try:
        inner = encode(old)[1:-1]
    except msgspec.MsgspecError:
        return old
    pair = encode(key) + b":" + value
    return raw(b"{%b}" % b",".join(random.sample((inner, pair), 2)))


def _other_case(old: Any, random: Random, others: list[Seed]) -> Any:
    """Go reads keys in any case."""
    if not isinstance(old, dict):
        return old
    return {random.choice((key, key.upper(), key.lower())): old[key] for key in old}


def _grafted(old: Any, random: Random, others: list[Seed]) -> Any:
    """A part of another sound input, where it does not belong."""
    other = random.choice(others)
    path = random.choice(other.paths)
    found = other.tree
    for key in path:
        found = found[key]
    return found


_CHANGES: tuple[Callable[[Any, Random, list[Seed]], Any], ...] = (
    _value, _value, _raw, _text, _text, _number, _number, _edited, _edited,
    _without, _more, _wrapped, _twice, _other_case, _grafted,
)  # fmt: skip


def written(tree: Any) -> bytes:
    """As JSON, with raw text in it; json writes what msgspec cannot write."""
    try:
        return encode(tree)
    except (msgspec.MsgspecError, OverflowError, TypeError, ValueError):
        return json.dumps(tree, default=lambda each: bytes(each).decode("latin-1")).encode()


def garbled(data: bytes, random: Random) -> bytes:
    """Cut, doubled, flipped or filled with what does not belong there."""
    if not data:
        return random.randbytes(random.randrange(64))
    for _ in range(random.choice((1, 1, 2, 8))):
        at = random.randrange(len(data) + 1)
        upto = min(len(data), at + random.choice((1, 1, 2, 8, 64)))
        match random.randrange(6):
            case 0:
                data = data[:at]
            case 1:
                data = data[:at] + data[upto:]
            case 2:
                data = data[:at] + data[at:upto] * random.choice((2, 3, 50)) + data[upto:]
            case 3:
                data = data[:at] + random.randbytes(upto - at) + data[upto:]
            case 4:
                data = data[:at] + random.choice(RAW) + data[at:]
            case _:
                data = data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]
    return data


def attack(seeds: list[Seed], random: Random) -> bytes:
    """One input: mostly a tree with wrong places, sometimes bytes that were a tree."""
    data = written(mutated(random.choice(seeds), random, seeds))
    return garbled(data, random) if random.random() < 0.15 else data
