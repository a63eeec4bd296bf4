"""Makes hostile inputs from valid inputs by changing values of a JSON tree, or bytes.

A tree is a value that ``json.loads`` returns. Content that is not valid JSON, or that JSON can
express in several ways, is inserted as raw text. The same seed produces the same inputs on every
machine.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

#: Raw text to insert. Some of it is not JSON, and decoders interpret some of it differently.
RAW = [
    b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400", b"1e-400", b"-0", b"0.1", b"1E2",
    b"9" * 30, b"-" + b"9" * 30, b"9" * 5000, b"00", b"0x10", b"+1", b".5", b"1.", b"tru", b"nul",
    b"undefined", b"'x'", b"", b" ", b",", b"[,]", b"{,}", b"{\"a\"}", b"[1,]", b"/* x */ 1",
    b'"\\ud800"', b'"\\udfff\\ud800"', b'"\\u0000"', b'"\\ud83d\\ude00"', b'"\xff\xfe"',
    b'"\xc0\x80"', b'"\xed\xa0\x80"', b'"\\x"', b'"\x00"', b'"\x1f"', b"\xef\xbb\xbf1",
    b'"' + b"a" * 5000 + b'"', b"[" * 200 + b"]" * 200, b"[" * 2000 + b"]" * 2000,
    b'{"a":' * 1500 + b"1" + b"}" * 1500, b"[" * 3000,
]  # fmt: skip

#: Values that may replace any other value.
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 255, 65535, 65536, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 44,
    (1 << 44) + 1, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, -(1 << 63), (1 << 64) - 1, 1 << 64,
    0.5, -0.5, 1.5, 1e18, 1e308, "", " ", "0", "-1", "1", "a", "x" * 300, "x" * 70_000, "%s%n%d",
    "../../etc/passwd", "a/b?c=d#e", "\u0000", "\u202e", "\U0001f600", "٣", "٨Gi", "1_000", "1e9",
    "Infinity", "nan", "null", "true", "\n", "\r\n\r\nHTTP/1.1 200 OK", "<script>",
    [], {}, [[]], [None], [{}], {"": ""}, {"a": None}, [1, "a", None, {}],
]  # fmt: skip

#: Strings that may replace quantities, annotations, timestamps and names.
TEXTS = [
    "8Gi", "1Mi", "80Gi", "0", "0Gi", "-8Gi", "8", "8G", "8.5Gi", "0.0001", "1e3", "1E", "16Ei",
    "9" * 20, "9" * 64, "9" * 65, "9" * 5000, "1e-999999999", "1e999999999", "Gi", "-", ".", "8 Gi",
    "25%", "0%", "100%", "100.0001%", "101%", "1.23456%", "-1%", "%", "main=8Gi,main=1Gi",
    "main=8Gi,cache=2Gi", "main=", "=8Gi", ",", "=", "main=8Gi" + ",a=1Gi" * 3000, "8Gi\u0000",
    "pack", "spread", "fragmentation", "predicted", "any", "gated", "steered", "PACK",
    "70%", "1024", "1025", "0001", "99999", "Always", "Succeeded", "Failed", "Running", "Pending",
    "1970-01-01T00:00:00Z", "9999-12-31T23:59:59.999999-23:59", "0001-01-01T00:00:00+23:59",
    "0001-01-01", "2026-13-45T99:99:99Z", "20260101T000000Z", "2026-W01-1", "2026-11-21T00:00:00",
    "all", "none", "void", "void,GPU-0", "0,1,2", "GPU-a", "GPU-b", "all,none",
    "tesla-" + "9" * 5000 + "gb", "nvidia-h100-80gb", "time-slicing", "time-sharing", "mps",
    "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb", "nvidia.com/mig-",
    "metadata.annotations['headroom.gpu/devices.0']", "NVIDIA_VISIBLE_DEVICES", "headroom-gate",
]  # fmt: skip


def mutated(tree: Any, random: Random, others: Sequence[Any]) -> Any:
    """Return a copy of ``tree`` with some changed values. One of seven copies is unchanged."""
    for _ in range(random.choice((0, 1, 1, 1, 2, 3, 6))):
        tree = _changed(tree, random, others)
    return tree


def _keys(tree: Any) -> Sequence[Any]:
    if isinstance(tree, dict):
        return list(tree)
    return range(len(tree)) if isinstance(tree, list) else ()


def _changed(tree: Any, random: Random, others: Sequence[Any]) -> Any:
    keys = _keys(tree)
    if not keys or random.random() < 0.05:
        return _replacement(tree, random, others)
    key, copy = random.choice(keys), tree.copy()
    copy[key] = _changed(tree[key], random, others)
    return copy


def _part(tree: Any, random: Random) -> Any:
    while (keys := _keys(tree)) and random.random() < 0.8:
        tree = tree[random.choice(keys)]
    return tree


def _replacement(old: Any, random: Random, others: Sequence[Any]) -> Any:
    """Return a variation of ``old``, or any other value."""
    if random.random() < 0.4:
        return _variation(old, random)
    number = random.getrandbits(random.randrange(1, 90)) * random.choice((1, -1))
    wrapped = random.choice(([old], {"x": old}, [[old]], {"metadata": old}, [old] * 40))
    raw = msgspec.Raw(random.choice(RAW))
    value, text = random.choice(VALUES), random.choice(TEXTS)
    grafted = _part(random.choice(others), random)
    return random.choice((value, value, text, text, raw, raw, number, wrapped, grafted))


def _variation(old: Any, random: Random) -> Any:
    keys = _keys(old)
    if isinstance(old, dict) and keys:
        key, value = random.choice(keys), random.choice(VALUES)
        rest = {each: old[each] for each in keys if each != key}
        more = {f"extra-{index}": value for index in range(random.choice((2, 10, 300)))}
        whole, second = msgspec.json.encode(old), msgspec.json.encode({key: value})
        twice = [whole[:-1] + b"," + second[1:], second[:-1] + b"," + whole[1:]]
        # Go's JSON decoder ignores the case of keys.
        cased = {random.choice((each, each.upper(), each.lower())): old[each] for each in keys}
        repeated = msgspec.Raw(random.choice(twice))
        return random.choice((rest, {**old, **more}, repeated, cased))
    if isinstance(old, list) and keys:
        at = random.randrange(len(old))
        return random.choice((old[:at] + old[at + 1 :], old * random.choice((2, 3, 10, 40, 300))))
    if isinstance(old, str) and old:
        at, put = random.randrange(len(old)), random.choice('\0%"\\é\U0001f600,=/9 ')
        edited = old[:at] + random.choice(("", put)) + old[at + 1 :]
        return random.choice((edited, edited, old + old, old[:at], old.upper()))
    if isinstance(old, int):
        return random.choice((-old, old + 1, old - 1, old << random.randrange(70), old * 10**25))
    return random.choice(TEXTS)


def garbled(data: bytes, random: Random) -> bytes:
    """Truncate ``data``, repeat or remove parts of it, or insert other bytes."""
    for _ in range(random.choice((1, 1, 2, 8))):
        at = random.randrange(len(data) + 1)
        end = at + random.choice((0, 1, 1, 2, 8, 64))
        old = data[at:end]
        repeated, noise = old * random.choice((2, 3, 50)), random.randbytes(len(old) or 64)
        new = random.choice((b"", repeated, noise, noise, random.choice(RAW) + old))
        data = data[:at] + new + (data[end:] if random.random() < 0.85 else b"")
    return data


def attack(seeds: Sequence[Any], random: Random) -> bytes:
    """Return a hostile input. It is usually a tree with some wrong values, or garbled bytes."""
    seed = random.choice(seeds)
    if isinstance(seed, bytes):
        times = random.choice((0, 2, 10, 1000)) if random.random() < 0.1 else 1
        return garbled(seed * times, random)
    data = msgspec.json.encode(mutated(seed, random, seeds))
    return garbled(data, random) if random.random() < 0.15 else data
